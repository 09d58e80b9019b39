"""The benchmark ``plan-grid``."""
