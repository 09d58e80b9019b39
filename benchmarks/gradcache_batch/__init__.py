"""The benchmark ``gradcache-batch``."""
