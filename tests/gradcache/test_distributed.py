"""Two processes: the gradient is the single-process big batch's, and everything travels once."""

from __future__ import annotations

import json

import pytest
import torch.distributed as dist

from tests.gradcache.distributed_worker import CLAIMS
from tests.programs import Program, run_programs

WORKER = """
import sys, warnings
warnings.simplefilter("error", FutureWarning)
from tests.gradcache.distributed_worker import main
main(int(sys.argv[1]), sys.argv[2])
"""

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="needs a torch built with gloo"
)


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """By claim, why it does not hold in each of the processes; nothing where it does."""
    store = tmp_path_factory.mktemp("store") / "rendezvous"
    ranks = run_programs([Program(WORKER, [rank, store]) for rank in range(2)])
    for rank in ranks:
        assert rank.status == 0, rank.errors
    return [json.loads(rank.output.splitlines()[-1]) for rank in ranks]


@pytest.mark.parametrize("claim", CLAIMS)
def test_in_two_processes(claim: str, failures: list[dict[str, str]]) -> None:
    assert [rank[claim] for rank in failures] == ["", ""]
