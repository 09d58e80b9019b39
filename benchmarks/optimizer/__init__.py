"""The question ``optimizer``: what clipping and AdamW cost when parameters, gradients and moments rest on disk."""
