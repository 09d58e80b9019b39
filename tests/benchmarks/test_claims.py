"""The table of claims follows from the JSON lines: its figures are those that the pages of results show."""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.claims import CLAIMS, RESULTS, Claim, claims_table, pair_steps, read_lines

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
        ratios = [mine["seconds"] / theirs["seconds"] for mine, theirs in pair_steps(lines, line["case"])]
        assert statistics.median(ratios) == line["ratio"]


def test_the_steps_of_a_pair_are_found_in_both_formats() -> None:
    steps = [{"seconds": float(k)} for k in range(6)]
    skipped: dict[str, Any] = {"case": "skipped", "steps": [], "skipped": "needs an accelerator"}
    first: list[dict[str, Any]] = [{"case": "reference", "steps": steps}, skipped, {"case": "a", "steps": steps[:2]}]
    last: dict[str, Any] = {"case": "b", "steps": [{"seconds": 9.0}, {"seconds": 8.0}, {"seconds": 7.0}]}
    assert [theirs["seconds"] for _, theirs in pair_steps([*first, last], "a")] == [2.0]
    assert list(pair_steps([*first, last], "b")) == [(last["steps"][1], steps[3]), (last["steps"][2], steps[4])]
    now = last | {"reference": [{"seconds": 1.0}] * 3}
    assert [mine["seconds"] / theirs["seconds"] for mine, theirs in pair_steps([*first, now], "b")] == [9.0, 8.0, 7.0]
    with pytest.raises(KeyError, match="expected a case 'c'"):
        pair_steps(first, "c")
