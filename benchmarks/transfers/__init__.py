"""The benchmark ``transfers``."""
