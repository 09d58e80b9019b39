"""Runs ``docs/examples/resume_after_faults.py`` under torchrun; rank 0 is killed after step 6 of the first attempt."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch.distributed as dist

from tests.examples import load_example


def report(step: int, loss: float) -> None:
    print(f"step {step}: loss {loss:.6f}", flush=True)
    if step == 6 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    module = load_example("resume_after_faults")
    module.begin()
    module.train(Path(sys.argv[1]), 9, 2, report=report)
    dist.destroy_process_group()
