"""Runs what several ranks do in forked children of one process, since each start of a process imports torch again.

``python -m tests.offload.mesh.parts FOLDER PART...`` runs all parts at the same time, and prints what each has printed.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from functools import partial
from pathlib import Path

from tests.offload.mesh.forked import fork

#: Each with its arguments.
PARTS = {
    "fault_worker": (),
    "exchange_worker": (),
    "pipeline_worker": (),
    "rows_worker": (),
    "restart_worker": ("--kills", "2", "--seed", "1"),
}


def run(part: str, folder: Path) -> None:
    """Runs one part, which prints into a file."""
    folder.mkdir()
    with open(folder / "output", "wb") as file:
        os.dup2(file.fileno(), 1)
    sys.argv = [part, str(folder / "work"), *PARTS[part]]
    (folder / "work").mkdir()
    importlib.import_module(f"tests.offload.mesh.{part}").main()
    sys.stdout.flush()


def main(name: str, *named: str) -> None:
    folder, parts = Path(name), named or tuple(PARTS)
    for part in parts:
        importlib.import_module(f"tests.offload.mesh.{part}")
    children = {part: fork(partial(run, part, folder / part)) for part in parts}
    ended = {part: child.result()[0] for part, child in children.items()}
    texts = {part: (folder / part / "output").read_text(encoding="utf-8").splitlines() for part in parts}
    print(json.dumps({part: json.loads(texts[part][-1]) if ended[part] == 0 else None for part in parts}))


if __name__ == "__main__":
    main(*sys.argv[1:])
