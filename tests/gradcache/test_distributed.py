"""Two processes: the gradient is the single-process big batch's, and everything travels once."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch.distributed as dist

from tests.programs import Program, run_programs

WORKER = """
import sys, warnings
warnings.simplefilter("error", FutureWarning)
from tests.gradcache.distributed_worker import main
main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
"""

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="needs a torch built with gloo"
)


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two processes measured, see ``distributed_worker``."""
    store = tmp_path_factory.mktemp("store") / "rendezvous"
    ranks = run_programs([Program(WORKER, [rank, 2, store]) for rank in range(2)])
    for rank in ranks:
        assert rank.status == 0, rank.errors
    return [json.loads(rank.output.splitlines()[-1]) for rank in ranks]


WAYS = ["even", "uneven", "tied", "static", "tiles", "temperature"]


@pytest.mark.parametrize("way", WAYS)
def test_loss_and_gradient_are_the_single_process_big_batch_s_not_one_over_world(
    reports: list[dict[str, Any]], way: str
) -> None:
    """Also for uneven last batches, tied towers, a static graph, and a learnable temperature."""
    for report in reports:
        assert report[way]["loss"] < 1e-6
        assert report[way]["gradient"] < 1e-6


@pytest.mark.parametrize("way", WAYS)
def test_each_gradient_and_each_representation_is_reduced_once_per_step(
    reports: list[dict[str, Any]], way: str
) -> None:
    """Not once per tower or chunk: one parameter each, one flag each, the targets' gradient, and the loss's value."""
    for report in reports:
        work = report[way]
        expected = sorted([work["parameters"], work["tensors"], work["representations"], 1])
        assert sorted(work["reduced"]) == expected


def test_a_wrapper_reduces_the_user_s_own_backward_after_a_step(reports: list[dict[str, Any]]) -> None:
    assert all(report["after"]["gradient"] < 1e-6 for report in reports)


def test_tower_unused_in_one_process_counts_zero_there_and_old_gradients_are_not_averaged_again(
    reports: list[dict[str, Any]],
) -> None:
    assert all(report["unused"]["gradient"] < 1e-5 for report in reports)


def test_training_step_begins_with_the_buffers_of_rank_0(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        assert report["buffers"]["running_mean"] == pytest.approx(report["buffers"]["bias"], abs=1e-6)


def test_decorators_gather_over_processes_of_different_sizes_and_axis_is_an_argument(
    reports: list[dict[str, Any]],
) -> None:
    """``@gather_input_tensor(axis=1)`` can not be used as a decorator in the peer."""
    for report in reports:
        assert report["functional"]["gradient"] < 1e-6
        assert report["functional"]["width"] == 3 + 4


def test_bfloat16_gradients_of_many_chunks_are_summed_over_processes_in_32_bits(reports: list[dict[str, Any]]) -> None:
    assert all(report["narrow"]["error"] < 0.01 for report in reports)


def test_an_offloaded_tower_in_a_data_parallel_wrapper_is_refused_because_its_gradients_would_not_be_averaged(
    reports: list[dict[str, Any]],
) -> None:
    assert all("average them after the step" in report["offloaded"] for report in reports)


def test_parameters_trained_by_a_function_are_averaged_for_every_kind_of_function(
    reports: list[dict[str, Any]],
) -> None:
    """A process_fn, a bound method of a loss and a lambda over a head kept each process's own gradient."""
    for report in reports:
        assert len(report["heads"]) == 15
        for how, error in report["heads"].items():
            assert error < 1e-6, how


@pytest.mark.parametrize("how", ["step", "encode"])
def test_hooks_change_each_process_s_sum_and_step_once_with_the_mean(reports: list[dict[str, Any]], how: str) -> None:
    for report in reports:
        assert report["hooks"][how]["steps"] == 4
        assert report["hooks"][how]["error"] < 1e-6


def test_hooks_of_parameters_that_fsdp_shards_run_once_a_step(reports: list[dict[str, Any]]) -> None:
    assert all(report["hooks of shards"] == [4, 4] for report in reports)


def test_a_trained_tensor_that_cannot_be_found_is_refused_before_any_gradient_is_written(
    reports: list[dict[str, Any]],
) -> None:
    for report in reports:
        for kind in ("loss_fn", "get_rep_fn"):
            assert "make the function an nn.Module" in report["hidden"][kind]
        assert report["hidden"]["untouched"]


@pytest.mark.parametrize("how", ["before", "after", "around"])
def test_another_forward_of_the_wrapper_takes_part_in_the_same_backward(
    reports: list[dict[str, Any]], how: str
) -> None:
    for report in reports:
        assert report["other forward"][how] < 1e-6


def test_sharded_towers_get_the_whole_batch_s_gradient_or_are_refused_before_anything_ran(
    reports: list[dict[str, Any]],
) -> None:
    """Unequal numbers of chunks aborted the job; running layer by layer over sharded layers crashed."""
    for report in reports:
        for how, found in report["sharded"].items():
            if not how.startswith("uneven"):
                assert found < 1e-6, how
                continue
            refusal, ran = found
            assert "as many chunks in every process" in refusal
            assert ran == []


def test_towers_under_other_wrappers_and_a_trained_loss_beside_an_offload_model_with_a_mesh(
    reports: list[dict[str, Any]],
) -> None:
    """The temperature and a head around the model kept each process's own gradient."""
    for report in reports:
        assert len(report["mesh"]) == 4
        for how, error in report["mesh"].items():
            assert error < 1e-6, how


def test_a_guide_over_all_processes_leaves_out_the_candidates_of_the_whole_batch(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        assert report["guided"]["loss"] < 1e-5
        assert report["guided"]["gradient"] < 1e-5


def test_ranking_over_all_processes_is_that_of_the_whole_batch(reports: list[dict[str, Any]]) -> None:
    """In every direction, with any weights of negatives, and for different numbers of rows."""
    for report in reports:
        for found in report["ranking"]:
            assert found["loss"] < 1e-5
            assert found["gradient"] < 1e-5
