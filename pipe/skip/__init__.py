"""Skip connections between layers of a pipeline: a tensor is copied directly to the stage that uses it."""

from pipe.skip.namespace import Namespace
from pipe.skip.skippable import pop, skippable, stash, verify_skippables

__all__ = ["Namespace", "pop", "skippable", "stash", "verify_skippables"]
