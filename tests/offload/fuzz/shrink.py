"""Makes a failing program as short and simple as it can be while it fails in the same way."""

from __future__ import annotations

from collections.abc import Callable

from tests.offload.fuzz.program import Program

__all__ = ["shrunk"]


def shrunk(program: Program, fails: Callable[[Program], bool], most_runs: int = 400) -> Program:
    """The simplest program that is found within so many runs; ``fails`` tells whether one still fails as it did."""
    runs = 0

    def better(other: Program) -> bool:
        nonlocal runs
        runs += 1
        return runs <= most_runs and fails(other)

    again = True
    while again and runs < most_runs:
        again = False
        for count in (4, 2, 1):
            k = len(program.statements) - count
            while k >= 0:
                other = program.without(k, count)
                if better(other):
                    program, again = other, True
                k -= 1
        for make in program.simpler():
            other = make()
            if better(other):
                program, again = other, True
                break
    return program
