"""``OffloadModel(mesh=...)`` in two processes: claims of ``mesh_worker``; those of four are in another file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.offload.mesh.mesh_worker import broken_claims, names_of

ROOT = Path(__file__).parents[3]
STAGES = "two", "device"
EXAMPLE = ROOT / "docs" / "examples" / "train_on_a_mesh.py"

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="needs a torch built with gloo"
)


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return broken_claims(tmp_path_factory.mktemp("mesh"), *STAGES)


@pytest.mark.parametrize("claim", names_of(*STAGES))
def test_claim_about_ranks(broken: dict[str, str], claim: str) -> None:
    assert broken[claim] == ""


def test_example_trains_and_resumes_in_two_processes() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "rank 0 of 2 stores 3201 of 6337 elements" in done.stdout
