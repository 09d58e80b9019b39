"""The question ``gradcache-batch``."""
