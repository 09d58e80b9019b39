"""The benchmark ``build-huge``."""
