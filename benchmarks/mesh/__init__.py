"""The benchmark ``mesh``."""
