"""The benchmark ``host-time``."""
