"""The benchmark ``scale``."""
