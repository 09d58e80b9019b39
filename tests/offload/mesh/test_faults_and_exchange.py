"""Ranks that fail, that are killed and resume, whose checkpoints others read, that are stages of a pipeline.

All run in forked children of a process that has imported torch, at the same time.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.programs import Program, run_programs

MAIN = "import sys; from tests.offload.mesh.{} import main; main(*sys.argv[1:])"
#: Modules with claims, and the least number of these.
CLAIMS = {"exchange_worker": 20, "pipeline_worker": 3}

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="needs a torch built with gloo"
)


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each worker has found."""
    given = {"fault_worker": (), "restart_worker": (2, 1), "forked": tuple(CLAIMS)}
    programs = [
        Program(MAIN.format(name), [place, *arguments])
        for name, arguments in given.items()
        for place in [tmp_path_factory.mktemp(name)]
    ]
    ended = run_programs(programs, seconds=240)
    assert not any(each.status for each in ended), [each.errors for each in ended]
    faults, restarts, claims = (json.loads(each.output.splitlines()[-1]) for each in ended)
    return {"fault_worker": faults, "restart_worker": restarts, **claims}


# --- a rank that fails ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["ends", "goes on", "backward"])
def test_rank_that_fails_alone_ends_the_others_and_is_never_mistaken_for_one_in_step(
    parts: dict[str, Any], way: str
) -> None:
    """A later call raises as well: without that, what it gathers could be the values of another shard."""
    (_, first), (_, second) = parts["fault_worker"][way]
    assert first[0] == "ValueError: this layer fails"
    assert all("RuntimeError" in line for line in (*first[1:], *second))
    assert "another rank raised, ended, or did not come in time" in second[0]
    assert "out of step; end all processes and resume from the last checkpoint" in second[1]
    assert (len(first), len(second)) == (1 if way == "ends" else 3, 3)


def test_failure_of_all_ranks_in_one_call_is_past_at_the_next(parts: dict[str, Any]) -> None:
    assert [raised for _, raised in parts["fault_worker"]["all"]] == [["ValueError: this layer fails", "", ""]] * 2


# --- kills and restarts -----------------------------------------------------------------------------------------------


def check_restarts(outcome: dict[str, Any], kills: int) -> None:
    assert sum(outcome["killed"].values()) == kills
    assert sum(outcome["errors"].values()) >= kills
    assert outcome["worst"] < 1e-5


def test_losses_after_a_kill_and_a_restart_are_those_of_a_run_without(parts: dict[str, Any]) -> None:
    check_restarts(parts["restart_worker"], 2)


@pytest.mark.slow
def test_losses_after_thirty_kills_at_events_of_all_kinds_are_those_of_a_run_without(tmp_path: Path) -> None:
    (done,) = run_programs([Program(MAIN.format("restart_worker"), [tmp_path, 30])], seconds=900)
    assert done.status == 0, done.errors
    outcome = json.loads(done.output.splitlines()[-1])
    check_restarts(outcome, 30)
    assert len(outcome["killed"]) >= 9, outcome


# --- checkpoints and pipelines ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("worker", "least"), CLAIMS.items())
def test_claims_about_checkpoints_and_pipelines(parts: dict[str, Any], worker: str, least: int) -> None:
    claims = parts[worker]
    assert len(claims) >= least
    assert not any(claims.values()), "\n".join(f"{name}: {text}" for name, text in claims.items() if text)
