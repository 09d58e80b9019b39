"""The benchmark ``frontier``."""
