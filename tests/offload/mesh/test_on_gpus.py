"""``OffloadModel(mesh=...)`` on GPUs, with nccl: a rank on each of them, or one that gathers from itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[3]

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(not dist.is_available() or not dist.is_nccl_available(), reason="needs a torch built with nccl"),
]


def test_ranks_on_gpus_train_as_one_model_on_all_rows(tmp_path: Path) -> None:
    """Twin: the claims "device" of test_mesh.py; of its streams: test_transport.py."""
    ranks = min(4, 1 << (torch.cuda.device_count().bit_length() - 1))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
    command += ["tests.offload.mesh.device_worker", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=dict(os.environ), timeout=300)
    assert done.returncode == 0, done.stderr
    assert f"rank {ranks - 1} of {ranks} trained on cuda:{ranks - 1}" in done.stdout
