"""Upstream's name of the module that repeats random states."""

from __future__ import annotations

from gradcache.two_pass import RandContext

__all__ = ["RandContext"]
