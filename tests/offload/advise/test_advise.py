"""Advice before anything is loaded: every kind of WHAT, from shapes only, with the bytes that steps then take."""

from __future__ import annotations

import contextlib
import itertools
import json
import struct
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offload import OffloadModel, OffloadOptimizer
from offload.advise.__main__ import _parser, main
from offload.advise.prediction import Situation, shard_bytes
from offload.advise.profile import works_of
from offload.advise.rates import Rates, _seconds, measure_rates
from offload.advise.report import Report
from offload.advise.sources import Source, source_of
from offload.files.tensor_file import StoredTensor
from offload.planning.choose import predict
from tests.offload.side_by_side import advance
from tests.offload.zoo import Attention, FeedForward
from tests.programs import run_program

RATES = Rates(
    flops=1e11,
    touched_bytes=1e10,
    read_bytes=1e9,
    write_bytes=1e9,
    update_bytes=1e9 / 6,
    memory_update_bytes=1e9,
    direct=True,
    states=2,
)
WIDTH = 64


def blocks() -> list[nn.Module]:
    return [nn.Sequential(nn.LayerNorm(WIDTH), Attention(WIDTH, 4), FeedForward(WIDTH)) for _ in range(5)]


def blocks_on_meta() -> list[nn.Module]:
    with torch.device("meta"):
        return blocks()


def source_of_layers(layers: Sequence[nn.Module]) -> Source:
    return Source(nn.Sequential(*layers), {str(k): layer for k, layer in enumerate(layers)})


def situation(source: Source, *, rows: int = 4, positions: int = 128) -> Situation:
    works = works_of(source, None, rows, [positions])
    return Situation(shard_bytes(works, None), [*works.values()], [rows], RATES)


BUILDERS = """
import torch
from torch import nn
def layers():
    return nn.Sequential(nn.Embedding(100, 32), *(nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 32)) for _ in range(3)), nn.Linear(32, 100))
def listed():
    return [nn.Linear(32, 32), nn.Linear(32, 32)]
def flat():
    return nn.Sequential(nn.Embedding(100, 32), nn.Flatten(), nn.Linear(512, 8))
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(100, 32)
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.head = nn.Linear(32, 100, bias=False)
        self.head.weight = self.words.weight
        self.scale = nn.Parameter(torch.ones(32))
    def reset_parameters(self):
        nn.init.ones_(self.scale)
    def forward(self, numbers):
        x = self.words(numbers) * self.scale
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)
def module():
    return Model()
def values():
    return nn.Sequential(nn.Linear(4, int(torch.ones(1).item())))
def convolutions():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(8 * 12 * 12, 10))
def needs(depth): ...
def nothing(): return [nn.ReLU()]
def number(): return 5
constant = 3
"""  # noqa: E501


@pytest.fixture
def builders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "builders_of_advice.py").write_text(BUILDERS, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "builders_of_advice", raising=False)
    return "builders_of_advice"


def sparse_file(path: Path, nbytes: int) -> None:
    """A safetensors file with one tensor and a hole in place of its values."""
    text = json.dumps({"x": {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes]}}).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + nbytes)


# --- what it is ---------------------------------------------------------------------------------------------------

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008}
LLAMA |= {"num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 32000}
GPT = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257}
GPT |= {"architectures": ["GPT2LMHeadModel"]}


@pytest.mark.parametrize(
    ("fields", "parameters", "count"),
    [pytest.param(LLAMA, 6_738_415_616, 35, id="Llama 2 7B"), pytest.param(GPT, 124_439_808, 16, id="GPT-2")],
)
def test_a_configuration_gives_the_published_number_of_parameters(
    fields: dict[str, Any], parameters: int, count: int, tmp_path: Path
) -> None:
    pytest.importorskip("transformers", reason="needs transformers")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields), encoding="utf-8")
    for what in (path, tmp_path):
        source = source_of(str(what), torch.float32)
        assert sum(p.numel() for p in source.model.parameters()) == parameters
        assert len(source.blocks) == count
        assert [*source.blocks][-1] == "lm_head"
        assert source.made_by == "OffloadModel"


def test_files_of_50_gigabytes_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="needs transformers")
    monkeypatch.setattr(StoredTensor, "read_into", lambda *_: pytest.fail("values were read"))
    large = LLAMA | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 28}
    (tmp_path / "config.json").write_text(json.dumps(large), encoding="utf-8")
    sparse_file(tmp_path / "model.safetensors", 50 << 30)
    for what in (tmp_path, tmp_path / "model.safetensors"):
        source = source_of(str(what), torch.float32)
        assert source.made_by == "OffloadModel.from_pretrained"
    given = situation(source, rows=1, positions=512)
    assert sum(s.home for s in given.shards) > 50 << 30
    least = given.least_bytes()
    assert given.at(least) is not None
    assert given.at(least - 1) is None


# --- what it takes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [12 << 20, 64 << 20])
@pytest.mark.parametrize("kind", ["layers", "transformers"])
def test_predicted_bytes_are_within_two_percent_of_what_the_planner_predicts_after_six_steps(
    kind: str, limit: int, tmp_path: Path
) -> None:
    if kind == "layers":
        x = torch.randn(4, 128, WIDTH)
        given = situation(source_of_layers(blocks_on_meta()))
        model = OffloadModel(blocks(), "cpu", tmp_path / "home", memory=limit)
    else:
        transformers = pytest.importorskip("transformers", reason="needs transformers")
        sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
        config = transformers.LlamaConfig(vocab_size=500, intermediate_size=128, **sizes)
        transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
        source = source_of(str(tmp_path / "llama"), torch.float32)
        names = ["model.embed_tokens", "model.layers", "model.norm", "lm_head"]
        assert source.named == f", blocks={names!r}, dtype=torch.float32"
        given, x = replace(situation(source, rows=2), apart=True), torch.randint(500, (2, 128))
        model = OffloadModel.from_pretrained(
            tmp_path / "llama", "cpu", tmp_path / "home", memory=limit, blocks=names, dtype=torch.float32
        )
    optimizer = OffloadOptimizer(model, torch.optim.AdamW, lr=1e-3)
    for _ in range(6):
        output = model(x)
        getattr(output, "logits", output).square().mean().backward()
        advance(optimizer)
    predicted = model.memory_report().predicted
    assert predicted is not None
    mine = predict(given.step_model(limit), predicted.choice).memory_bytes
    assert mine == pytest.approx(predicted.peak.memory, rel=0.02)  # without the margin of earlier steps
    model.close()


def test_more_memory_is_not_slower_and_the_least_is_the_least() -> None:
    given = situation(source_of_layers(blocks_on_meta()))
    unlimited = given.at(1 << 62)
    assert unlimited is not None
    least, most = given.least_bytes(), unlimited.memory_bytes
    limits = [least + (most - least) * k // 5 for k in range(6)]
    found = [given.at(limit) for limit in limits]
    assert all(one and one.memory_bytes <= limit for one, limit in zip(found, limits, strict=True))
    assert all(more.forecast.seconds <= less.forecast.seconds * 1.01 for less, more in itertools.pairwise(found))
    assert given.at(least * 98 // 100) is None


# --- what is printed ----------------------------------------------------------------------------------------------


@pytest.fixture
def rates_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is measured."""

    def rates(*arguments: Any, states: Any, **more: Any) -> Rates:
        return replace(RATES, state_share=(1 + 4 / 256) / 4 if states == "8bit" else 1.0)

    monkeypatch.setattr("offload.advise.report.measure_rates", rates)


def advice(*arguments: str) -> Report:
    return Report(_parser().parse_args(arguments))


@pytest.mark.usefixtures("rates_given")
@pytest.mark.parametrize("states", ["full", "8bit"])
@pytest.mark.parametrize("function", ["layers", "listed", "module"])
def test_the_lines_for_a_function_run_as_they_are_printed(builders: str, function: str, states: str) -> None:
    found = advice(f"{builders}:{function}", "--tokens", "256", "--memory", "64MiB", "--states", states)
    assert found.situation.at(found.situation.least_bytes()) is not None
    elements = sum(found.situation.home_bytes) / 4 / found.source.elements  # weights, gradients, states
    assert elements == pytest.approx(4 if states == "full" else 2.5 + 1 / 128, rel=0.01) or function == "module"
    assert any("the input is" in assumption for assumption in found.source.assumptions)
    names: dict[str, Any] = {}
    exec("\n".join(found.lines), names)
    model: Any = names["model"]
    assert len(model._homes.shards) == found.memory_report.predicted.model.shards
    x = torch.zeros(4, 64, 32) if function == "listed" else torch.zeros(4, 64, dtype=torch.long)
    model(x).sum().backward()
    names["optimizer"].step()
    model.close()


@pytest.mark.usefixtures("rates_given")
@pytest.mark.parametrize("what", ["llama", "llama/config.json"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_lines_for_a_folder_of_transformers_run_as_they_are_printed(
    what: str, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    monkeypatch.chdir(tmp_path)
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 128}
    config = transformers.LlamaConfig(vocab_size=500, tie_word_embeddings=tied, dtype="bfloat16", **sizes)
    plain = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    plain.save_pretrained("llama")
    found = advice(what, "--tokens", "64", "--memory", "64MiB")
    names: dict[str, Any] = {}
    exec("\n".join(found.lines), names)
    model = names["model"]
    assert len(model._homes.shards) == found.memory_report.predicted.model.shards == 7
    assert {p.dtype for p in model.parameters()} == {torch.float32}, "as it was predicted"
    if what == "llama":
        for name, p in plain.named_parameters():
            assert torch.equal(p.float(), model.get_parameter(name))
    model(torch.ones(1, 8, dtype=torch.long)).logits.sum().backward()
    names["optimizer"].step()
    model.close()


@pytest.mark.usefixtures("rates_given")
def test_the_name_of_a_folder_never_becomes_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="needs transformers")
    monkeypatch.chdir(tmp_path)
    bad = "'] | exit() | ['{exit()}\nexit()"
    Path(bad).mkdir()
    (Path(bad) / "config.json").write_text(json.dumps(GPT | {"n_layer": 2, "n_embd": 48, "n_head": 2}), "utf-8")
    sparse_file(Path(bad) / "model.safetensors", 8)
    found = advice(bad, "--tokens", "8", "--memory", "1GiB")
    assert not [line for line in found.lines if "\n" in line]
    line = next(line for line in found.lines if line.startswith("model = "))
    seen: list[Any] = []
    model: Any = type("", (), {"from_pretrained": lambda *args, **kwargs: seen.extend(args)})
    exec(line, {"OffloadModel": model, "torch": torch})
    assert bad in seen


@pytest.mark.usefixtures("rates_given")
@pytest.mark.parametrize("memory", ["64MiB", "1KiB"])
def test_what_is_printed_is_the_table_of_a_memory_report_and_a_line_for_each_limit(memory: str, builders: str) -> None:
    """Of the least memory, where the given one is too little."""
    found = advice(f"{builders}:layers", "--tokens", "256", "--memory", memory, "--dtype", "bfloat16")
    printed, report, (least, _) = str(found), found.memory_report, found.advices["least"]
    fits = found.advices["given"][1] is not None
    assert fits == (memory == "64MiB")
    assert report.limit_bytes == (64 << 20 if fits else least)
    assert ("short of the least" in printed) != fits
    chosen = f"memory='{memory if fits else f'{-(-least >> 20)}MiB'}'"
    for name in ("--memory", "the least", "twice --memory", "all of use", "param_dtype=torch.bfloat16", chosen):
        assert name in printed
    assert str(report) in printed
    assert report.predicted is not None
    assert sum(dict(report.predicted.uses).values()) == report.predicted.memory_bytes


@pytest.mark.usefixtures("rates_given")
def test_layers_run_on_the_shape_that_is_given(builders: str) -> None:
    found = advice(f"{builders}:convolutions", "--tokens", "8", "--memory", "64MiB", "--input", "8,3,16,16")
    assert found.source.assumptions == ["the input is float32 of shape (8, 3, 16, 16)"]


#: What is wrong -> the arguments, with ``M`` for the module, and what the error names.
WRONG = {
    "no such path": ("nowhere", "WHAT"),
    "no function": ("M:constant", "WHAT"),
    "arguments": ("M:needs", "depth"),
    "values": ("M:values", "meta device"),
    "no parameters": ("M:nothing", "parameters"),
    "no layers": ("M:number", "WHAT"),
    "an empty directory": ("empty", "WHAT"),
    "no configuration": ("M.py", "config.json"),
    "no class": ("partly/config.json", "architectures"),
    "no model": ("other/config.json", "model_type"),
    "layers for other rows": ("M:flat", "--positions"),
    "no tokens": ("M:layers --tokens 0", "--tokens"),
    "positions": ("M:layers --positions 3", "--positions"),
    "no shape": ("M:convolutions", "--input"),
    "input": ("M:layers --input 8,x", "--input"),
    "micro-batches": ("M:layers --microbatches 2", "--microbatches"),
    "optimizer": ("M:layers --optimizer Fast", "--optimizer"),
    "states": ("M:layers --optimizer Adafactor --states 8bit", "Adafactor updates a matrix differently"),
    "device": ("M:layers --device abacus", "--device"),
}


@pytest.mark.parametrize("case", WRONG)
def test_bad_input_ends_with_one_line_that_names_the_argument(
    builders: str, case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if case in ("no class", "no model"):
        pytest.importorskip("transformers", reason="needs transformers")
    (tmp_path / "empty").mkdir()
    for folder, fields in (("partly", {"model_type": "gpt2"}), ("other", {"a": 1})):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    arguments, named = WRONG[case]
    what, *more = arguments.replace("M", builders, 1).split() if arguments[0] == "M" else arguments.split()
    with pytest.raises(SystemExit, match="2"):
        main([what, "--tokens", "8", "--memory", "1GiB", *more])
    captured = capsys.readouterr()
    assert captured.out == ""
    assert named in captured.err.splitlines()[-1]


def test_a_missing_argument_is_named() -> None:
    code = "import runpy; runpy.run_module('offload.advise', run_name='__main__')"
    ended = run_program(code, "x", "--tokens", "8")
    assert ended.status == 2
    assert "--memory" in ended.errors.splitlines()[-1]


# --- what is measured ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "states", "count", "share"),
    [("AdamW", None, 2, 1), ("AdamW", "8bit", 2, (1 + 1 / 64) / 4), ("SGD", None, 0, 1), ("Adagrad", None, 1, 1)],
)
def test_rates_are_measured_by_steps_whose_files_are_removed(
    optimizer: str, states: Any, count: int, share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offload.advise.rates.SECONDS_EACH", 0.01)
    monkeypatch.setattr("offload.advise.rates.WIDTH", 128)
    rates = measure_rates(
        torch.device("cpu"),
        torch.float32,
        home=f"{tmp_path}/not/yet",
        home_bytes=1 << 60,
        trained_bytes=0,
        optimizer=optimizer,
        states=states,
    )
    speeds = [rates.flops, rates.touched_bytes, rates.read_bytes, rates.write_bytes]
    assert min(*speeds, rates.update_bytes, rates.memory_update_bytes) > 0
    assert (rates.states, rates.state_share) == (count, pytest.approx(share))
    assert rates.direct
    assert not list(tmp_path.iterdir())


def test_seconds_on_a_device_are_measured_while_it_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The timer of torch waits for that one only; of another it would measure how fast the host queues work."""
    monkeypatch.setattr("offload.advise.rates.SECONDS_EACH", 0.0001)
    entered: list[torch.device] = []

    @contextlib.contextmanager
    def device(each: torch.device) -> Iterator[None]:
        entered.append(each)
        yield
        entered.clear()

    monkeypatch.setattr(torch.cuda, "device", device)
    works: list[bool] = []
    _seconds(torch.device("cuda", 1), lambda: works.append(bool(entered)))
    assert works
    assert all(works)
