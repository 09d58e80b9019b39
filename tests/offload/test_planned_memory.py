"""``OffloadModel(memory=...)``: whatever is planned, the result is the plain model's."""

from __future__ import annotations

import copy
import re
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import MemoryPolicy, OffloadModel, OffloadOptimizer
from offload.planner.memory_planner import MemoryPlanner
from offload.planning.choose import moves
from offload.telemetry.peak import anonymous_bytes
from tests.offload import side_by_side
from tests.offload.side_by_side import advance, assert_equal, drawn
from tests.offload.zoo import OwnForward

WIDTH, ROWS, DEPTH = 256, 64, 6
MIB = 1 << 20


@pytest.fixture(autouse=True, scope="module")
def _warmed() -> None:
    """What counts is the rise above a process whose libraries have the scratch memory of products of these sizes."""
    plain = stack()
    for rows in (ROWS, 3000):
        plain(torch.randn(rows, WIDTH)).square().mean().backward()


def stack() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(DEPTH)
        )
    )


def made(home: Any, memory: Any, kind: Any = torch.optim.SGD, **options: Any) -> tuple[OffloadModel, OffloadOptimizer]:
    """A model of :func:`stack` that is planned, and its optimizer."""
    model = OffloadModel(stack(), "cpu", home, memory=memory, **options)
    return model, OffloadOptimizer(model, kind, **({"lr": 0.1} if kind is torch.optim.SGD else {}))


def planner_of(model: OffloadModel) -> MemoryPlanner:
    planner = model._homes.steps.planner
    assert planner is not None
    return planner


def on_a_device(model: OffloadModel, nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers compute in a memory whose allocator tells that steps take so many bytes more than at their begin."""
    planner_of(model)._memory.on_host = False
    monkeypatch.setattr("offload.telemetry.peak.PeakMeter.rise", lambda self: nbytes)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, rows: int = ROWS) -> list[float]:
    return side_by_side.train(model, optimizer, [drawn(k, rows, WIDTH) for k in range(steps)])


@pytest.mark.parametrize("memory", ["23MiB", "32MiB", "64MiB", "1GiB", "auto"])
@pytest.mark.parametrize("where", ["disk", "host"])
def test_training_is_that_of_the_plain_model_whatever_memory_allows(memory: str, where: str, tmp_path: Path) -> None:
    if where == "host" and memory in ("23MiB", "32MiB"):
        memory = "96MiB"  # homes in host memory count
    plain = stack()
    model = OffloadModel(stack(), "cpu", tmp_path if where == "disk" else "cpu", memory=memory)
    ours = OffloadOptimizer(model, torch.optim.SGD, lr=0.1, momentum=0.9)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    assert train(model, ours, 6) == train(plain, theirs, 6)
    assert_equal(plain, model)
    assert planner_of(model).choice is not None
    model.close()


def test_a_larger_batch_keeps_fewer_graphs_and_a_smaller_one_more(tmp_path: Path) -> None:
    model, optimizer = made(tmp_path, MemoryPolicy("96MiB", slots=2, resident_bytes=0))
    kept = []
    for rows in (512, 512, 2048, 128, 512):
        train(model, optimizer, 1, rows)
        choice = planner_of(model).choice
        kept.append(-1 if choice is None else len(choice.kept))
    assert kept[0] == -1
    assert kept[2] < kept[1] <= kept[3] == DEPTH
    assert kept[4] == kept[1]


def test_a_batch_that_cannot_fit_is_refused_before_anything_moves(tmp_path: Path) -> None:
    model, optimizer = made(tmp_path, "30MiB")
    train(model, optimizer, 2)
    optimizer.synchronize()
    before, loads = copy.deepcopy(model.state_dict()), model.statistics().shard_loads
    with pytest.raises(ValueError, match=r"100000 rows takes at least .* pass more memory, fewer rows"):
        model(torch.randn(100_000, WIDTH))
    assert model.statistics().shard_loads == loads
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert len(train(model, optimizer, 1)) == 1


@pytest.mark.parametrize(("home", "memory"), [("disk", "30MiB"), ("host", "48MiB")], indirect=["home"])
def test_a_size_that_ran_is_not_refused_later_nor_a_smaller_one(
    home: str, memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Homes in host memory keep boundaries: there is no file to spill them to."""
    model, optimizer = made(home, memory)
    on_a_device(model, 500 * MIB, monkeypatch)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*first of longer rows, is not known", RuntimeWarning)
        with pytest.warns(RuntimeWarning, match="by which earlier steps exceeded their prediction"):
            losses = train(model, optimizer, 6)
    choice = planner_of(model).choice
    assert choice is not None
    assert not choice.in_memory | choice.kept | choice.waiting  # it goes on with the least memory
    assert "allocator and buffers of operations, measured" in str(model.memory_report())
    assert model.memory_report().more is None
    plain = stack()
    assert losses == train(plain, torch.optim.SGD(plain.parameters(), lr=0.1), 6)
    with pytest.warns(RuntimeWarning, match="57 rows takes at least"):
        train(model, optimizer, 1, rows=ROWS - 7)
    with pytest.raises(ValueError, match="65 rows takes at least"):
        train(model, optimizer, 1, rows=ROWS + 1)


def test_states_that_are_made_with_the_optimizer_leave_memory_for_their_files(tmp_path: Path) -> None:
    layers = [nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024)) for _ in range(8)]
    model = OffloadModel(layers, "cpu", tmp_path, memory="100MiB")
    before = anonymous_bytes()
    optimizer = OffloadOptimizer(model, torch.optim.Adagrad)
    assert sum(optimizer.state_bytes(shard) for shard in model._homes.shards) > 64 * MIB
    assert anonymous_bytes() - before < 24 * MIB


def test_the_report_is_a_table_that_adds_up_to_the_peak_and_says_what_more_memory_would_buy(tmp_path: Path) -> None:
    model, optimizer = made(tmp_path / "home", "40MiB", torch.optim.AdamW)
    assert "when one training step has been measured" in str(model.memory_report())
    train(model, optimizer, 6)
    report = model.memory_report()
    words, choice = str(report), report.predicted.choice
    parts = [[re.split(r"  +", line.strip()) for line in part.splitlines()[1:]] for part in words.split("\n\n")]
    sizes, seconds, others = {row[0]: float(row[1]) for row in parts[0]}, parts[1], parts[2]
    ends = {
        "predicted": report.predicted.memory_bytes / MIB, "measured": report.measured_bytes / MIB, "limit": 40
    }  # fmt: skip
    assert [*sizes][-3:] == [*ends]
    assert {name: sizes[name] for name in ends} == pytest.approx(ends, abs=0.005)
    uses = [*sizes.values()][:-3]
    assert uses == sorted(uses, reverse=True)
    assert {"homes", "slots", "update buffers", "output", "running cell"} <= sizes.keys()
    assert sum(uses) == pytest.approx(sizes["predicted"], abs=0.005 * len(sizes))
    assert (streaming := DEPTH - len(choice.in_memory))
    assert f"{len(choice.in_memory)} of 6 shards in memory" in words
    assert f"{choice.slots} slots, through which {streaming} of 6 shards stream" in words
    lanes = [each.what for each in moves(report.predicted)]
    assert {"loads", "updates"} <= {*lanes}
    assert [row[0] for row in seconds] == ["compute", *lanes, "predicted", "measured"]
    assert all(re.fullmatch(r"[\d.e+]+ m?s", row[1 if len(row) < 4 else 2]) for row in seconds), seconds
    assert others[0][:2] == ["more memory", "50.00"]
    assert "shards in memory" in others[0][3]


def test_what_a_process_holds_beside_what_is_counted_is_predicted_and_decides_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for rise in (0, 400 * MIB):
        model, optimizer = made(tmp_path / str(rise), "40MiB")
        with monkeypatch.context() as patch, warnings.catch_warnings(action="ignore"):
            patch.setattr("offload.telemetry.peak.PeakMeter.rise", lambda self, rise=rise: rise)
            losses = train(model, optimizer, 6)
        report = model.memory_report()
        assert report.measured_bytes <= report.predicted.memory_bytes
        assert report.predicted.memory_bytes == model.estimate(ROWS).memory_bytes
        found.append((losses, report.predicted.choice, report.predicted.peak.memory))
    assert found[0] == found[1]
    assert report.predicted.memory_bytes < report.measured_bytes + 40 * MIB
    assert re.search(r"beside these +[\d.]+ +allocator and buffers of operations, measured", str(report))


def test_the_picture_shows_the_uses_beside_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = OffloadModel(stack(), "cpu", tmp_path / "home", memory="40MiB")
    with pytest.raises(RuntimeError, match="run one training step first"):
        model.memory_report().plot(tmp_path / "memory.png")
    train(model, OffloadOptimizer(model, torch.optim.AdamW), 3)
    report = model.memory_report()
    report.plot(tmp_path / "memory.svg")
    picture = (tmp_path / "memory.svg").read_text(encoding="utf-8")
    comments = re.findall(r"<!-- (.*?) -->", picture)  # of each text that is drawn
    for words in (r"memory of a step on cpu: [\d.]+ MiB of 40.0 MiB", "limit: 40.0 MiB", "slots: .* MiB", "measured"):
        assert any(re.fullmatch(words, text) for text in comments), (words, comments)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'gradstream\[bench\]'"):
        report.plot(tmp_path / "memory.png")


def test_shards_whose_weights_are_viewed_elsewhere_stay_where_they_are(tmp_path: Path) -> None:
    plain = stack()
    model = OffloadModel(copy.deepcopy(plain), "cpu", tmp_path, memory="1GiB")
    optimizer = OffloadOptimizer(model, torch.optim.SGD, lr=0.1)
    views = model.state_dict()
    with pytest.warns(RuntimeWarning, match="without moving shards"):
        losses = train(model, optimizer, 4)
    assert losses == train(plain, torch.optim.SGD(plain.parameters(), lr=0.1), 4)
    assert not planner_of(model)._streamer.in_place()
    optimizer.synchronize()
    for name, p in plain.named_parameters():
        assert torch.equal(views[name], p), name


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize(("depth", "width", "rows", "microbatches"), [(1, 16, 8, 1), (5, 128, 200, 3), (4, 128, 8, 1)])
def test_a_model_made_with_the_least_that_an_error_names_gets_past_it(
    depth: int, width: int, rows: int, microbatches: int, kind: Any
) -> None:
    """Of the model, of its optimizer's buffers, and of a step, which warns; each once at most."""
    refused: list[str] = []
    more: dict[str, Any] = {"memory": 64}
    with (
        tempfile.TemporaryDirectory() as folder,
        pytest.MonkeyPatch.context() as patch,
        warnings.catch_warnings(action="error"),
    ):
        # What a process of this size takes besides is noise.
        patch.setattr("offload.telemetry.peak.PeakMeter.rise", lambda self: None)
        while len(refused) == len(set(refused)):
            where = "model"
            bare = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth)))
            try:
                model = OffloadModel(bare, "cpu", f"{folder}/", num_microbatches=microbatches, **more)
                where = "optimizer"
                optimizer = OffloadOptimizer(model, kind, lr=0.01)
                where = "step"
                for _ in range(5):
                    model(torch.ones(rows, width)).sum().backward()
                    advance(optimizer)
                break
            except (ValueError, RuntimeWarning) as error:
                refused.append(where)
                more["memory"] = int(re.findall(r"memory=(\d+)", str(error))[-1])
                if found := re.findall(r" and num_slices=(\d+)", str(error)):
                    more["num_slices"] = int(found[0])
    assert refused[0] == "model"
    assert len(refused) == len(set(refused))


@pytest.mark.parametrize("kind", [OwnForward, lambda layers: nn.Sequential(*layers)], ids=["blocks", "layers"])
def test_rows_that_are_longer_than_before_are_planned_or_refused_as_more_rows(tmp_path: Path, kind: Any) -> None:
    layers = kind([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(DEPTH)])
    how = {"blocks": "layers"} if kind is OwnForward else {}
    model = OffloadModel(copy.deepcopy(layers), "cpu", tmp_path, memory=MemoryPolicy("40MiB", resident_bytes=0), **how)
    optimizer = OffloadOptimizer(model, torch.optim.SGD, lr=0.1)
    plain = torch.optim.SGD(layers.parameters(), lr=0.1)
    batches = [torch.randn(16, length, WIDTH) for length in (8, 8, 8, 8, 40, 4, 41, 8)]
    assert side_by_side.train(model, optimizer, batches) == side_by_side.train(layers, plain, batches)
    assert_equal(layers, model)
    assert {rows for _, rows in planner_of(model)._ran} == {(16,), (80,), (8,), (88,)}  # 82 is rounded up
    before = model.statistics()
    with pytest.raises(ValueError, match=r"80000 rows as long as those of the first batch takes .* or shorter"):
        model(torch.zeros(16, 40000, WIDTH))
    assert model.statistics() == before
    model(torch.randn(16, 8, WIDTH)).square().mean().backward()


class Squares(nn.Module):
    """Takes memory by the square of the length of its rows."""

    def forward(self, x: Tensor) -> Tensor:
        return x + (x @ x.transpose(1, 2)).softmax(-1) @ x


def test_rows_longer_than_all_before_have_the_least_memory_and_their_excess_is_told_once(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), Squares()) for _ in range(DEPTH)))
    model = OffloadModel(layers, "cpu", tmp_path, len(layers), memory=MemoryPolicy("4MiB", resident_bytes=0))
    optimizer, planner = OffloadOptimizer(model, torch.optim.SGD, lr=0.1), planner_of(model)

    def graphs_kept(length: int) -> int:
        model(torch.randn(2, length, 16)).square().mean().backward()
        advance(optimizer)
        return 0 if planner.choice is None else len(planner.choice.kept)

    assert [graphs_kept(32) for _ in range(14)][-1]
    with pytest.warns(RuntimeWarning, match=r"took .* more than memory=.* Begin with the longest rows") as warned:
        assert not graphs_kept(1600)
    assert len(warned) == 1
    assert not planner._memory._beside.keys() & {80}
    assert graphs_kept(32)


@pytest.mark.parametrize("ours", [False, True])
def test_states_of_an_optimizer_of_torch_that_outgrow_the_limit_are_told_once(
    ours: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = OffloadModel(stack(), "cpu", tmp_path, memory="30MiB")
    optimizer = OffloadOptimizer(model, torch.optim.AdamW) if ours else torch.optim.AdamW(model.parameters())
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        train(model, optimizer, 1)
        monkeypatch.setattr(planner_of(model)._memory, "grown_bytes", lambda: 200 * MIB)
        train(model, optimizer, 2)
    told = [str(each.message) for each in seen if "OffloadOptimizer(model, " in str(each.message)]
    assert len(told) == (not ours)
    assert all("memory=30.0 MiB does not count the states of optimizers of torch" in words for words in told)


@pytest.mark.parametrize(
    ("ran", "later", "refused"),
    [
        ([[(8, WIDTH)] * 4] * 3, [(8, WIDTH)] * 3, [(17, WIDTH)]),
        ([[(8, WIDTH)] * 4] * 3, [(8, WIDTH)], [(16, WIDTH)] * 3),
        ([[(8, WIDTH), (8, WIDTH), (4, WIDTH)]] * 3, [(8, WIDTH), (4, WIDTH)], [(17, WIDTH)]),
        ([[(16, WIDTH)] * 2] * 3, [(8, WIDTH)] * 4, [(16, WIDTH)] * 3),
        # As two columns of texts, of which the short one is padded to another length in each step.
        ([[(8, n, WIDTH), (8, 48, WIDTH)] for n in (9, 11, 10)], [(8, 12, WIDTH), (8, 48, WIDTH)], [(9, 48, WIDTH)]),
    ],
    ids=str,
)
def test_fewer_or_smaller_micro_batches_than_ran_are_not_refused(
    ran: list[Any], later: list[Any], refused: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = OffloadModel(stack(), "cpu", tmp_path, memory="30MiB")

    def step(shapes: list[Any]) -> None:
        outputs = model.forward_chunks([torch.randn(shape) for shape in shapes])
        torch.autograd.backward(outputs, [y.detach() for y in outputs])

    on_a_device(model, 500 * MIB, monkeypatch)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "a step of micro-batches", RuntimeWarning)  # each size says so once
        for shapes in (*ran, later):
            step(shapes)
    with pytest.raises(ValueError, match="takes at least"):
        step(refused)
