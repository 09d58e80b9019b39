"""The long form: ``python -m tests.offload.fuzz --examples 10000 --seed 0``.

Draws programs, goes on after a failure, and prints at the end each distinct failure once, shrunk, as code to paste.
"""

from __future__ import annotations

import argparse
import collections
import faulthandler
import gc
import sys
import tempfile
import time
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded

from tests.offload.fuzz.blocks import BLOCKS
from tests.offload.fuzz.draw import programs
from tests.offload.fuzz.lockstep import Failure, run
from tests.offload.fuzz.program import Program
from tests.offload.fuzz.shrink import shrunk
from tests.offload.fuzz.without import MECHANISMS, without

#: The program that runs: a hang or a crash of the interpreter leaves it here.
CURRENT = Path(tempfile.gettempdir()) / "training-loop-that-runs.txt"
#: Failures of one signature that are shrunk.
TRIES = 3


def alike(failure: Failure | None, signature: tuple[str, str]) -> bool:
    """Whether a failure is of this signature; what the look at the end saw may be seen at a statement too."""
    if failure is None:
        return False
    return failure.signature == signature or (signature[0] == "the end" and failure.signature[1] == signature[1])


def main() -> int:
    """Runs the fuzz; the exit status is 1 if anything failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.offload.fuzz", description=__doc__)
    parser.add_argument("--examples", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--refusals", action="store_true", help="list the words of refusals, and how often")
    parser.add_argument("--minutes", type=float, default=None, help="stop drawing after this time")
    parser.add_argument("--without", choices=MECHANISMS, default=None, help="take this mechanism out of the engine")
    parser.add_argument("--but", default=None, help="name of a known fault that programs may run into")
    parser.add_argument("--blocks", action="store_true", help="draw only models whose own forward calls blocks")
    options = parser.parse_args()
    faulthandler.enable()
    found: dict[tuple[str, str], list[tuple[int, Program, Failure]]] = collections.defaultdict(list)
    outcomes: collections.Counter[str] = collections.Counter()
    refusals: collections.Counter[str] = collections.Counter()
    models: collections.Counter[str] = collections.Counter()
    begin, count = time.monotonic(), 0

    def failure_of(program: Program) -> Failure | None:
        with without(options.without):
            return run(program).failure

    @seeded(options.seed)
    @settings(
        max_examples=options.examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(programs(but=options.but, models=sorted(BLOCKS) if options.blocks else None))
    def draw(program: Program) -> None:
        nonlocal count
        if options.minutes is not None and time.monotonic() - begin > options.minutes * 60:
            return
        count += 1
        faulthandler.dump_traceback_later(120, exit=True)
        CURRENT.write_text(repr(program))
        with without(options.without):
            outcome = run(program)
        outcomes[outcome.kind] += 1
        if outcome.kind in ("refused", "raised"):
            refusals[f"{outcome.kind}: {outcome.words[:130]}"] += 1
        if outcome.failure is not None:
            if outcome.failure.signature not in found:
                print(f"# example {count}: {outcome.failure}\n{program!r}", file=sys.stderr, flush=True)
            found[outcome.failure.signature].append((count, program, outcome.failure))
            models[program.setup.model] += 1
        if count % 100 == 0:
            gc.collect()
            rate = count / (time.monotonic() - begin)
            print(f"{count} programs, {rate:.0f}/s, {dict(outcomes)}, {len(found)} kinds", file=sys.stderr, flush=True)

    draw()
    faulthandler.cancel_dump_traceback_later()
    print(f"{count} programs in {time.monotonic() - begin:.0f} s: {dict(outcomes)}; by model {dict(models)}")
    seen: dict[str, int] = {}
    if found:
        print("from tests.offload.fuzz.paste import *")
    for signature, entries in sorted(found.items(), key=lambda item: -len(item[1])):
        print(f"\n=== {signature}: {len(entries)} times, first after {entries[0][0]}")
        entries.sort(key=lambda entry: len(entry[1].statements))
        for number, program, failure in entries[:TRIES]:
            small = shrunk(program, lambda p, s=signature: alike(failure_of(p), s))
            text = repr(small)
            if text in seen:
                continue
            seen[text] = number
            print(f"# example {number}: {failure_of(small) or failure}\ncheck({text})", flush=True)
    if options.refusals:
        print("\n=== refusals")
        for words, times in refusals.most_common():
            print(f"{times:6d}  {words}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
