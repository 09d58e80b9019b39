"""Weights and states in safetensors files: written, read, and taken over."""
