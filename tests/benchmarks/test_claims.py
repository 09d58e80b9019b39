"""The table of claims follows from the JSON lines: its figures are those that the pages of results show."""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.claims import CLAIMS, RESULTS, Claim, _in_pairs, _in_rounds, claims_table, read_lines

ROOT = Path(__file__).parents[2]


def test_the_command_prints_one_row_for_each_claim_and_imports_no_torch() -> None:
    program = (
        "import sys; from benchmarks.__main__ import main\n"
        "assert main(['table', '--links', 'results/']) == 0; assert 'torch' not in sys.modules"
    )
    shown = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert shown.strip() == claims_table(links="results/")
    assert len(shown.splitlines()) == 2 + len(CLAIMS)
    assert "](results/optimizer.md) |" in shown


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: f"{claim.page}: {claim.peer}")
def test_a_time_ratio_is_the_one_on_its_page(claim: Claim) -> None:
    page = (RESULTS / f"{claim.page}.md").read_text(encoding="utf-8")
    times = claim.times(read_lines(RESULTS / f"{claim.page}.jsonl")[1])
    middle = claim.middle(times)
    shown = {f"{middle:.2f} (", f"{middle:.3f} (", f"| {middle:.3f} |", f"{1 / middle:.2f} ("}
    if claim.page == "train-overlap":  # the page has a row for each balance
        shown |= {f"{value:.3f} (" for value in times}
    assert any(figure in re.sub(" +", " ", page) for figure in shown)


@pytest.mark.parametrize("page", ["optimizer", "gradcache-batch", "memory-latency"])
def test_the_published_ratio_of_each_case_is_the_median_of_its_pairs(page: str) -> None:
    _, lines = read_lines(RESULTS / f"{page}.jsonl")
    published = [line for line in lines if line["ratio"] is not None and not line["case"].startswith("forward")]
    assert len(published) >= 1
    for line in published:
        assert statistics.median(_in_pairs(line["case"])([line])) == line["ratio"]


def test_steps_in_turn_are_divided_by_those_beside_them_and_steps_of_a_round_by_those_of_its_peer() -> None:
    steps = [{"seconds": float(k)} for k in (9, 8, 7)]
    lines: list[dict[str, Any]] = [
        {"case": "reference", "steps": [{"seconds": 5.0}], "reference": []},
        {"case": "a", "steps": steps, "reference": [{"seconds": 2.0}] * 3},
        {"case": "b", "steps": [{"seconds": 1.0}] * 2, "reference": []},
    ]
    assert _in_pairs("a")(lines) == [4.5, 4.0, 3.5]
    assert _in_rounds("a", "b")(lines) == [9.0, 8.0]  # b ended after two
