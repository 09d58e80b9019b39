"""``OffloadModel`` for any ``nn.Module``: its blocks stream, and its own forward runs."""
