"""All names that a printed program uses: ``from tests.offload.fuzz.paste import *``, and paste it behind."""

from __future__ import annotations

from tests.offload.fuzz import around, gradients, hooks, passes, weights
from tests.offload.fuzz.around import *  # noqa: F403
from tests.offload.fuzz.gradients import *  # noqa: F403
from tests.offload.fuzz.hooks import *  # noqa: F403
from tests.offload.fuzz.lockstep import check, run
from tests.offload.fuzz.passes import *  # noqa: F403
from tests.offload.fuzz.program import Program, Setup
from tests.offload.fuzz.weights import *  # noqa: F403

__all__ = ["Program", "Setup", "check", "run"]
__all__ += around.__all__ + gradients.__all__ + hooks.__all__ + passes.__all__ + weights.__all__
