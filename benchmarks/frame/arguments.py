"""What questions ask of their options before they measure for minutes: all that is wrong is told at once."""

from __future__ import annotations

import argparse

__all__ = ["at_least"]


def at_least(arguments: argparse.Namespace, *names: str, **others: int) -> None:
    """Each of ``names`` must be at least 1, each of ``others`` at least its value.

    Raises:
        ValueError: naming every option that is not.
    """
    bounds = dict.fromkeys(names, 1) | others
    wrong = [
        f"expected at least {least}, got {name}={getattr(arguments, name)}"
        for name, least in bounds.items()
        if getattr(arguments, name) < least
    ]
    if wrong:
        raise ValueError("; ".join(wrong))
