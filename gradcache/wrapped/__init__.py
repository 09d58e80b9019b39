"""Towers that contain streamed models: their forwards are suspended at each call of such a model."""
