"""The benchmark ``optimizer``."""
