"""``OffloadModel(mesh=...)`` in two and four processes: the claims of ``mesh_worker``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from offload import OffloadModel, OffloadOptimizer
from tests.offload.mesh import mesh_worker

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "docs" / "examples" / "train_on_a_mesh.py"

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="needs a torch built with gloo"
)


def started(ranks: int, folder: Path, which: str) -> list[subprocess.Popen[str]]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    return [
        subprocess.Popen(
            [
                sys.executable,
                "-W",
                "error::UserWarning:offload",
                "-m",
                "tests.offload.mesh.mesh_worker",
                str(rank),
                str(ranks),
                str(folder),
                which,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment,
        )
        for rank in range(ranks)
    ]


def outputs_of(workers: list[subprocess.Popen[str]]) -> list[tuple[str, str]]:
    try:
        return [worker.communicate(timeout=120) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()


def broken_claims(ranks: int, folder: Path, which: str) -> list[dict[str, str]]:
    workers = started(ranks, folder, which)
    found = []
    for worker, (output, errors) in zip(workers, outputs_of(workers), strict=True):
        assert worker.returncode == 0, errors
        found.append(json.loads(output.splitlines()[-1]))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("two")


@pytest.fixture(scope="module")
def two(folder: Path) -> list[dict[str, str]]:
    """What does not hold in two processes, by rank."""
    return broken_claims(2, folder, "all")


@pytest.mark.parametrize("claim", [claim.__name__ for claim in mesh_worker.CLAIMS])
def test_in_two_processes(two: list[dict[str, str]], claim: str) -> None:
    assert not any(claim in broken for broken in two), "\n".join(broken.get(claim, "") for broken in two)


def test_in_four_processes(tmp_path: Path) -> None:
    assert broken_claims(4, tmp_path, "some") == [{}] * 4


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_checkpoint_of_two_ranks_is_read_by_one_process(two: list[dict[str, str]], folder: Path) -> None:
    assert not any("checkpoints_are_written_by_all_ranks" in broken for broken in two)
    model = OffloadModel(mesh_worker.build(seed=9), "cpu", num_slices=3, checkpoint_activation=True)
    optimizer = OffloadOptimizer(model, torch.optim.AdamW, lr=0.5)
    mesh_worker.resume(folder / "checkpoint", model, optimizer)
    mesh_worker.run(model, optimizer, None, mesh_worker.batches()[1:])
    expected = torch.load(folder / "expected.pt")
    assert max(float((p.detach() - expected[name]).abs().max()) for name, p in model.named_parameters()) < 1e-5


def test_example_trains_and_resumes_in_two_processes() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "rank 0 of 2 stores 3201 of 6337 elements" in done.stdout
