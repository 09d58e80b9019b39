"""The benchmark ``pipe-ladder``."""
