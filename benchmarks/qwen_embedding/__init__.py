"""The benchmark ``qwen-embedding``."""
