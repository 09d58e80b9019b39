"""``OffloadModel(mesh=...)`` in two and four processes: the claims of ``mesh_worker``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.offload.mesh import mesh_worker
from tests.programs import run_program

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "docs" / "examples" / "train_on_a_mesh.py"

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="needs a torch built with gloo"
)


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """How claims are broken, by their names."""
    code = "import sys; from tests.offload.mesh.forked import main; main(*sys.argv[1:])"
    # A claim that hangs is ended by the timeout of its ranks.
    done = run_program(code, tmp_path_factory.mktemp("mesh"), "mesh_worker", seconds=900)
    assert done.status == 0, done.errors
    found: dict[str, str] = json.loads(done.output.splitlines()[-1])["mesh_worker"]
    return found


@pytest.mark.parametrize("claim", mesh_worker.NAMES)
def test_claim_about_ranks(broken: dict[str, str], claim: str) -> None:
    assert broken[claim] == ""


def test_example_trains_and_resumes_in_two_processes() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "rank 0 of 2 stores 3201 of 6337 elements" in done.stdout
