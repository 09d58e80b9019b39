"""The benchmark ``gpu``."""
