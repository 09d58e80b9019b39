"""The benchmark ``offload-step``."""
