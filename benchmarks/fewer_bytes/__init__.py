"""The benchmark ``fewer-bytes``."""
