"""The benchmark ``train-overlap``."""
