"""Checkpoints and pretrained weights in safetensors files, read into storage without a ``state_dict`` in memory."""
