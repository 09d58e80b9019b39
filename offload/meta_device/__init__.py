"""Layers on the meta device: how their parameters get values where they are stored."""
