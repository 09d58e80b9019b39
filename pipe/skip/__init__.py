"""Skip connections between layers that are far apart: a tensor goes straight to the stage that uses it."""

from pipe.skip.namespace import Namespace
from pipe.skip.skippable import pop, skippable, stash, verify_skippables

__all__ = ["Namespace", "pop", "skippable", "stash", "verify_skippables"]
