"""The case that walks a grid of plans, one after the other in one process."""

import warnings
from typing import Any

from benchmarks.frontier.methods import OURS, Work, folder, ours, plan_of, tidy, warm
from benchmarks.harness.io_counters import measure
from benchmarks.harness.worker import Reporter

#: The first step of a model measures it, the second is the first of its plan.
STEPS, COUNTED = 4, 2


def walk(report: Reporter, work: dict[str, Any], memory: int, points: list[dict[str, int]]) -> dict[str, Any]:
    """Runs a few steps of a model for each of ``points``: fields of a :class:`~offload.MemoryPolicy`."""
    chosen = Work(**work)
    warm(OURS, chosen, {})
    for fields in points:
        made, seconds, told, plan = None, [], "", None
        try:
            with warnings.catch_warnings(action="error", category=RuntimeWarning):
                made = ours(chosen, folder(), memory, fields)
                for k in range(STEPS):
                    batch = chosen.batch(k)
                    seconds.append(measure(lambda made=made, batch=batch: made.step(*batch))[1]["seconds"])
            plan = plan_of(made.model)
        except (ValueError, RuntimeWarning) as error:  # it does not fit
            told = str(error)
        finally:
            if made is not None:
                made.model.close()
        report.step(fields=fields, seconds=None if told else min(seconds[-COUNTED:]), plan=plan, refused=told)
        del made
        tidy()
    return {}
