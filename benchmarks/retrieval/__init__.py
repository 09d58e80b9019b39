"""The benchmark ``retrieval``."""
