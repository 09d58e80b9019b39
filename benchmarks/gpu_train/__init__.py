"""The benchmark ``gpu-train``."""
