"""Advice before anything is loaded: every kind of WHAT, from headers only, with the bytes that steps then take."""

from __future__ import annotations

import itertools
import json
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from offload import MemoryPolicy, OffloadModel, OffloadOptimizer
from offload.advise.__main__ import main
from offload.advise.blocks import layers_by_name
from offload.advise.config import outline_of_config
from offload.advise.outline import Layer, Outline, ParameterShape
from offload.advise.prediction import Moved, Situation, advise, moved_by, shards_of
from offload.advise.profile import profile
from offload.advise.rates import OptimizerRate, Rates, measure_optimizer, measure_rates
from offload.advise.sources import outline_of
from offload.advise.works import works_of
from offload.files.tensor_file import TensorFile, write_tensors
from offload.optim.state_forms import form_of
from offload.planning.step_model import predict
from pipe.torch_private.dispatch import OperationMode

RATES = Rates(1e11, 1e11, 1e10, 1e9, 1e9, 1e9, 1e9, True, True)
ADAMW = OptimizerRate("AdamW", 2, 1e9)
WIDTH = 64


class Block(nn.Module):
    """A transformer block with fused attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, 4, WIDTH // 4)).permute(2, 0, 3, 1, 4)
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        out: Tensor = x + self.narrow(functional.gelu(self.wide(self.norm2(x))))
        return out


def blocks() -> list[nn.Module]:
    return [Block() for _ in range(5)]


BUILDERS = """
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
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
def module():
    return Model()
def values():
    import torch
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


def sparse_file(path: Path, shapes: Mapping[str, tuple[int, ...]], kind: str = "BF16", itemsize: int = 2) -> None:
    """A safetensors file with a header and a hole in place of values."""
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + torch.Size(shape).numel() * itemsize
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def named_shapes(blocks: int, width: int, vocabulary: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"lm_head.weight": (vocabulary, width)}
    shapes["model.embed_tokens.weight"] = (vocabulary, width)
    for k in range(blocks):
        for name in ("q", "k", "v", "o"):
            shapes[f"model.layers.{k}.self_attn.{name}_proj.weight"] = (width, width)
        shapes[f"model.layers.{k}.mlp.experts.0.weight"] = (4 * width, width)
        shapes[f"model.layers.{k}.mlp.experts.1.weight"] = (4 * width, width)
        shapes[f"model.layers.{k}.norm.weight"] = (width,)
    shapes["model.norm.weight"] = (width,)
    return shapes


@pytest.fixture
def no_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading values of a safetensors file fails."""

    def read(*arguments: Any) -> None:
        raise AssertionError("values were read")

    for name in ("_read", "tensor", "read_into", "verify"):
        monkeypatch.setattr(TensorFile, name, read)


def situation(outline: Outline, *, rows: int = 4, positions: int = 128) -> Situation:
    shards = shards_of(outline, None)
    works = works_of(outline, shards, rows=rows, positions=positions)
    return Situation(shards, works, [rows], ADAMW, RATES)


def test_beside_a_device_shards_and_gradients_are_in_host_memory_as_far_as_it_reaches(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    sparse_file(path, named_shapes(6, 256, 1000))
    on_host = situation(outline_of(str(path), torch.float32))
    rates = replace(RATES, to_device_bytes=40e9)
    each = [
        sum(part)
        for part in zip(
            on_host.shards.home_bytes,
            on_host.shards.stored_gradient_bytes,
            on_host.shards.state_bytes(on_host.optimizer.states),
            strict=True,
        )
    ]
    spare = on_host.shards.stored_gradient_bytes[3]
    beside = replace(on_host, rates=rates, host_bytes=int(sum(each[:3])) + spare)
    assert beside.resting == {j: int(each[j]) for j in range(3)}
    model = beside.step_model(1 << 40)
    assert model.host_bytes == spare
    loaded = beside.shards.loaded_bytes
    assert model.costs.load[2] == loaded[2] / 40e9 < model.costs.load[3] == loaded[3] / RATES.read_bytes
    assert model.costs.update[2] == beside.shards.gradient_bytes[2] / ADAMW.bytes_per_second
    assert model.costs.updated_at_step == {0, 1, 2}
    advice = beside.at(1 << 40)
    assert advice.prediction is not None
    assert advice.prediction.choice.in_memory == frozenset()
    whole = replace(beside, host_bytes=1 << 40).at(1 << 40)
    assert whole.seconds < advice.seconds
    assert moved_by(replace(beside, host_bytes=1 << 40), whole) == (Moved(), Moved())


# --- what it is ---------------------------------------------------------------------------------------------------


def test_names_become_embedding_blocks_by_number_norm_and_head() -> None:
    shapes = named_shapes(11, 8, 32)
    layers = layers_by_name(ParameterShape(name, shape, torch.float32) for name, shape in sorted(shapes.items()))
    expected = ["model.embed_tokens", *(f"model.layers.{k}" for k in range(11)), "model.norm", "lm_head"]
    assert [layer.name for layer in layers] == expected
    assert sum(len(layer.own) for layer in layers) == len(shapes)
    assert [layer.looks_up for layer in layers] == [True, *[False] * 13]


def test_layers_of_a_sequential_and_of_a_module_beside_a_container_are_found_by_name() -> None:
    names = ["bert.encoder.layer.0.a.weight", "bert.encoder.layer.1.a.weight", "bert.pooler.dense.weight"]
    names += ["bert.embeddings.word.weight", "bert.embeddings.LayerNorm.weight", "conv.0.weight"]
    layers = layers_by_name(ParameterShape(name, (4, 4), torch.float32) for name in names)
    expected = ["bert.embeddings", "bert.encoder.layer.0", "bert.encoder.layer.1", "bert.pooler", "conv"]
    assert [layer.name for layer in layers] == expected
    sequential = layers_by_name(ParameterShape(f"{k}.weight", (4, 4), torch.float32) for k in (10, 9, 0))
    assert [layer.name for layer in sequential] == ["0", "9", "10"]


def test_an_encoder_with_a_decoder_is_no_chain_of_layers() -> None:
    names = [f"{side}.block.{k}.weight" for side in ("encoder", "decoder") for k in range(2)]
    with pytest.raises(ValueError, match="follow one another"):
        layers_by_name(ParameterShape(name, (4, 4), torch.float32) for name in names)


@pytest.mark.usefixtures("no_values")
def test_a_file_of_50_gigabytes_needs_only_its_header(tmp_path: Path) -> None:
    shapes = named_shapes(40, 8192, 128_000)
    path = tmp_path / "model.safetensors"
    sparse_file(path, shapes)
    assert path.stat().st_size > 50e9
    outline = outline_of(str(path), torch.float32)
    assert outline.elements == sum(torch.Size(shape).numel() for shape in shapes.values())
    given = situation(outline, rows=1, positions=512)
    least = given.least_bytes()
    assert given.at(least).prediction is not None
    assert given.at(least - 1).prediction is None


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("what", ["layers", "listed"])
def test_the_least_memory_of_a_tiny_model_is_enough(
    what: str, rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiny.py").write_text(BUILDERS, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "tiny", raising=False)
    shape = None if what == "layers" else (32,)
    outline = outline_of(f"tiny:{what}", torch.float32)
    shards = shards_of(outline, None)
    works = works_of(outline, shards, rows=rows, positions=16, row_shape=shape)
    given = Situation(shards, works, [rows], ADAMW, RATES)
    assert given.at(given.least_bytes()).prediction is not None


@pytest.mark.usefixtures("no_values")
def test_an_index_and_its_directory_are_read_as_one_model(tmp_path: Path) -> None:
    shapes = named_shapes(2, 16, 64)
    names = list(shapes)
    for number, part in enumerate((names[:5], names[5:])):
        sparse_file(tmp_path / f"part-{number}.safetensors", {name: shapes[name] for name in part})
    index = {"weight_map": {name: f"part-{int(k >= 5)}.safetensors" for k, name in enumerate(names)}}
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps(index), encoding="utf-8")
    by_index, by_folder = (outline_of(str(what), torch.float32) for what in (path, tmp_path))
    assert by_index.layers == by_folder.layers
    assert by_index.elements == sum(torch.Size(shape).numel() for shape in shapes.values())


def test_a_configuration_beside_the_files_says_that_the_head_is_tied(tmp_path: Path) -> None:
    shapes = named_shapes(2, 16, 64)
    del shapes["lm_head.weight"]
    sparse_file(tmp_path / "model.safetensors", shapes)
    fields = {"model_type": "llama", "hidden_size": 16, "vocab_size": 64, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    head = outline_of(str(tmp_path), torch.float32).layers[-1]
    assert (head.name, head.own, [p.name for p in head.borrowed]) == ("lm_head", (), ["model.embed_tokens.weight"])


LLAMA = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32}
LLAMA |= {"num_attention_heads": 32, "vocab_size": 32000}
MISTRAL = LLAMA | {"model_type": "mistral", "intermediate_size": 14336, "num_key_value_heads": 8}
QWEN = {"model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24}
QWEN |= {"num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True}
GPT = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257}


@pytest.mark.parametrize(
    ("fields", "parameters"),
    [
        pytest.param(LLAMA, 6_738_415_616, id="Llama 2 7B"),
        pytest.param(MISTRAL, 7_241_732_096, id="Mistral 7B"),
        pytest.param(QWEN, 494_032_768, id="Qwen2 0.5B"),
        pytest.param(GPT, 124_439_808, id="GPT-2"),
    ],
)
def test_a_configuration_gives_the_published_number_of_parameters(
    fields: dict[str, Any], parameters: int, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields), encoding="utf-8")
    for what in (path, tmp_path):
        outline = outline_of(str(what), torch.float32)
        assert outline.elements == parameters
        assert "head" in outline.layers[-1].name


@pytest.mark.parametrize("fields", [LLAMA, MISTRAL, QWEN, GPT], ids=lambda fields: fields["model_type"])
def test_a_configuration_gives_the_parameters_that_transformers_makes(fields: dict[str, Any], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields), encoding="utf-8")
    with torch.device("meta"):
        made = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(tmp_path))
    expected = {name: tuple(p.shape) for name, p in made.named_parameters()}
    outline = outline_of_config(path, torch.float32)
    assert {p.name: p.shape for layer in outline.layers for p in layer.own} == expected


# --- what it takes ------------------------------------------------------------------------------------------------


def trained(layers: list[nn.Module], x: Tensor, home: Path, limit: int | MemoryPolicy) -> OffloadModel:
    """A model after six steps under a limit."""
    model = OffloadModel(layers, "cpu", home, memory=limit)
    optimizer = OffloadOptimizer(model, torch.optim.AdamW, lr=1e-3)
    for _ in range(6):
        functional.mse_loss(model(x), x).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def test_shapes_on_the_meta_device_give_the_bytes_that_steps_measure(tmp_path: Path) -> None:
    layers, x = blocks(), torch.randn(4, 128, WIDTH)
    works = profile([[layer] for layer in blocks_on_meta()], x.to("meta"))
    model = trained(layers, x, tmp_path / "home", MemoryPolicy(64 << 20, resident_bytes=0))
    measured = model._homes.measured([4])
    assert set(measured.sizes.memory_profiles) == set(range(5))
    for j, work in enumerate(works):
        assert list(measured.sizes.memory_profiles[j].saved_tensors) == list(work.saved)
        assert list(measured.sizes.kept_profiles[j].saved_tensors) == list(work.kept)
        assert measured.sizes.boundaries((j + 1, 0)) == work.output_bytes
    model.close()


def blocks_on_meta() -> list[nn.Module]:
    with torch.device("meta"):
        return blocks()


@pytest.mark.parametrize("limit", [12 << 20, 64 << 20])
def test_predicted_bytes_are_within_two_percent_of_what_the_planner_predicts_after_six_steps(
    tmp_path: Path, limit: int
) -> None:
    x = torch.randn(4, 128, WIDTH)
    model = trained(blocks(), x, tmp_path / "home", limit)
    report = model.memory_report()
    assert report.predicted is not None
    layers = blocks_on_meta()
    names = [(str(k), layer) for k, layer in enumerate(layers)]
    own = [[ParameterShape(n, tuple(p.shape), p.dtype) for n, p in layer.named_parameters()] for _, layer in names]
    outline = Outline([Layer(name, tuple(p)) for (name, _), p in zip(names, own, strict=True)], modules=layers)
    given = situation(outline)
    step = given.step_model(limit)
    mine = predict(step, report.predicted.choice).memory_bytes
    theirs = report.predicted.peak.memory_bytes  # without the margin of earlier steps
    assert mine == pytest.approx(theirs, rel=0.02)
    model.close()


def test_buffers_of_updates_count_in_full_after_updates_whose_gradients_were_in_memory(tmp_path: Path) -> None:
    x = torch.randn(4, 128, WIDTH)
    model = OffloadModel(blocks(), "cpu", tmp_path / "home", memory=12 << 20)
    optimizer = OffloadOptimizer(model, torch.optim.AdamW, lr=1e-3)
    reserved = model._homes.measured([4]).buffer_bytes
    model._homes.streamer.gradient_offload.waiting = frozenset(range(5))
    functional.mse_loss(model(x), x).backward()
    optimizer.step()
    optimizer.synchronize()
    assert model._homes.measured([4]).buffer_bytes == reserved
    model.close()


@pytest.mark.parametrize("limit", [8 << 20, 1 << 30])
def test_slots_gradients_and_buffers_are_those_of_a_new_model(tmp_path: Path, limit: int) -> None:
    model = OffloadModel(blocks(), "cpu", tmp_path / "home", memory=limit)
    optimizer = OffloadOptimizer(model, torch.optim.AdamW, lr=1e-3)
    theirs = model._homes.measured([4])
    layers = blocks_on_meta()
    own = [tuple(ParameterShape(n, tuple(p.shape), p.dtype) for n, p in layer.named_parameters()) for layer in layers]
    ours = situation(Outline([Layer(str(k), p) for k, p in enumerate(own)], modules=layers)).step_model(limit)
    mine, real = ours.sizes, theirs.sizes
    assert (mine.slot_bytes, mine.gradient_bytes) == (real.slot_bytes, real.gradient_bytes)
    assert mine.constant_bytes == real.constant_bytes
    assert ours.buffer_bytes == theirs.buffer_bytes > 0
    del optimizer
    model.close()


def test_the_formula_for_blocks_is_within_a_fifth_of_the_exact_bytes_and_operations() -> None:
    exact = profile([[layer] for layer in blocks_on_meta()], torch.empty(4, 128, WIDTH, device="meta"))[1]
    outline = Outline(
        layers_by_name(
            ParameterShape(f"blocks.{k}.{n}", tuple(p.shape), p.dtype)
            for k, layer in enumerate(blocks_on_meta())
            for n, p in layer.named_parameters()
        )
    )
    formula = situation(outline).works[1]
    assert formula.output_bytes == exact.output_bytes
    assert sum(s.freed for s in formula.saved) == pytest.approx(sum(s.freed for s in exact.saved), rel=0.2)
    assert sum(s.stays for s in formula.saved) == pytest.approx(sum(s.stays for s in exact.saved), rel=0.05)
    assert formula.forward_flops == pytest.approx(exact.forward_flops, rel=0.05)
    assert formula.backward_flops == pytest.approx(exact.backward_flops, rel=0.2)


def test_planning_computes_nothing_reads_nothing_and_repeats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Nothing(OperationMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError(f"{func} ran")

    path = tmp_path / "model.safetensors"
    sparse_file(path, named_shapes(6, 256, 1000))
    given = situation(outline_of(str(path), torch.float32))
    monkeypatch.setattr("builtins.open", None)
    monkeypatch.setattr("os.open", None)
    with Nothing():
        first, second = advise(given, 64 << 20), advise(given, 64 << 20)
    assert first == second


def test_more_memory_is_not_slower_and_the_least_is_the_least(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    sparse_file(path, named_shapes(6, 256, 1000))
    given = situation(outline_of(str(path), torch.float32))
    least, most = given.least_bytes(), given.most_bytes()
    limits = [least + (most - least) * k // 5 for k in range(6)]
    found = [given.at(limit) for limit in limits]
    assert all(one.prediction and one.prediction.memory_bytes <= one.limit_bytes for one in found)
    assert all(more.seconds <= less.seconds * 1.01 for less, more in itertools.pairwise(found))
    assert given.at(least * 98 // 100).prediction is None


# --- what is printed ----------------------------------------------------------------------------------------------


@pytest.fixture
def rates_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is measured."""
    monkeypatch.setattr("offload.advise.__main__.measure_rates", lambda *args, **kwargs: RATES)
    monkeypatch.setattr(
        "offload.advise.__main__.measure_optimizer",
        lambda name, states, weights=None: replace(ADAMW, form=form_of(states)),
    )


def advice_as_fields(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main([*arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.usefixtures("rates_given")
@pytest.mark.parametrize("function", ["layers", "listed"])
def test_the_lines_for_a_function_run_as_they_are_printed(
    builders: str, function: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = advice_as_fields(capsys, f"{builders}:{function}", "--tokens", "256", "--memory", "64MiB")
    assert any("the input is" in assumption for assumption in found["assumptions"])
    names: dict[str, Any] = {}
    exec("\n".join(found["lines"]), names)
    model: Any = names["model"]
    assert len(model._homes.shards) == found["shards"]
    x = torch.zeros(4, 64, dtype=torch.long) if function == "layers" else torch.zeros(4, 64, 32)
    model(x).sum().backward()
    names["optimizer"].step()
    model.close()


@pytest.mark.usefixtures("rates_given")
def test_the_lines_for_files_load_them_into_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    def build() -> nn.Module:
        model = nn.Module()
        model.model = nn.Module()
        model.model.embed_tokens = nn.Embedding(32, 8)
        model.model.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(12))
        model.lm_head = nn.Linear(8, 32, bias=False)
        return model

    plain = build()
    write_tensors(tmp_path / "model.safetensors", {name: p.detach() for name, p in plain.named_parameters()})
    found = advice_as_fields(capsys, "model.safetensors", "--tokens", "8", "--memory", "64MiB", "--positions", "4")
    given: dict[str, Any] = {"build": build}
    exec("\n".join(found["lines"]), given)
    for (name, p), (same, loaded) in zip(plain.named_parameters(), given["model"].named_parameters(), strict=True):
        assert name == same
        assert torch.equal(p, loaded)
    assert len(given["model"]._homes.shards) == found["shards"] == 14
    given["model"].close()


@pytest.mark.usefixtures("rates_given")
def test_the_lines_for_a_folder_of_transformers_run_as_they_are_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    monkeypatch.chdir(tmp_path)
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 128}
    for tied in (False, True):
        config = transformers.LlamaConfig(vocab_size=500, tie_word_embeddings=tied, **sizes)
        transformers.LlamaForCausalLM(config).save_pretrained("llama")
        capsys.readouterr()
        found = advice_as_fields(capsys, "llama", "--tokens", "64", "--memory", "64MiB")
        names: dict[str, Any] = {}
        exec("\n".join(found["lines"]), names)
        assert len(names["model"]._homes.shards) == found["shards"]
        names["model"](torch.ones(1, 8, dtype=torch.long)).logits.sum().backward()
        names["optimizer"].step()
        names["model"].close()


@pytest.mark.usefixtures("rates_given")
def test_names_in_a_file_never_become_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    bad = "'] | exit() | ['{exit()}\nexit()"
    sparse_file(tmp_path / "m.safetensors", {f"{bad}.{k}.weight": (8, 8) for k in range(3)} | {bad: (8, 8)})
    found = advice_as_fields(capsys, "m.safetensors", "--tokens", "8", "--memory", "64MiB")
    assert not [line for line in found["lines"] if "\n" in line]
    line = next(line for line in found["lines"] if line.startswith("model = "))
    seen: list[Any] = []
    model: Any = type("", (), {"from_pretrained": lambda *args, blocks, **kwargs: seen.extend(blocks)})
    exec(line, {"OffloadModel": model, "build": None})
    assert any(bad in name for name in seen)


@pytest.mark.usefixtures("rates_given")
def test_memory_that_is_too_little_is_shown_with_the_least_in_its_place(
    builders: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = advice_as_fields(capsys, f"{builders}:layers", "--tokens", "256", "--memory", "1KiB")
    given, least = found["limits"][:2]
    assert not given["fits"]
    assert least["fits"]
    (line,) = [line for line in found["lines"] if line.startswith("model = ")]
    assert f"memory='{-(-least['limit_bytes'] >> 20)}MiB'" in line
    assert main([f"{builders}:layers", "--tokens", "256", "--memory", "1KiB"]) == 0
    assert "short of the least" in capsys.readouterr().out


@pytest.mark.usefixtures("rates_given")
@pytest.mark.parametrize("function", ["module", "flat"])
def test_layers_that_cannot_run_on_these_tokens_are_predicted_by_the_formula_which_is_said(
    builders: str, function: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = advice_as_fields(capsys, f"{builders}:{function}", "--tokens", "256", "--memory", "64MiB")
    assert any("by a formula" in assumption for assumption in found["assumptions"])


@pytest.mark.usefixtures("rates_given")
def test_the_table_has_a_line_for_each_limit(builders: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"{builders}:layers", "--tokens", "256", "--memory", "64MiB", "--dtype", "bfloat16"]) == 0
    printed = capsys.readouterr().out
    for name in ("--memory", "the least", "twice --memory", "all of use", "param_dtype=torch.bfloat16"):
        assert name in printed


@pytest.mark.usefixtures("rates_given")
def test_convolutions_run_on_the_shape_that_is_given(builders: str, capsys: pytest.CaptureFixture[str]) -> None:
    what = [f"{builders}:convolutions", "--tokens", "8", "--memory", "64MiB"]
    found = advice_as_fields(capsys, *what, "--input", "8,3,16,16")
    assert found["assumptions"] == ["the input is float32 of shape (8, 3, 16, 16)"]
    assert main(what) == 2
    assert "--input" in capsys.readouterr().err
    assert main([*what, "--input", "8,4,16,16"]) == 2
    assert "--input" in capsys.readouterr().err


@pytest.mark.usefixtures("rates_given")
def test_several_tables_become_parts_of_the_first_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shapes = {"t.wte.weight": (64, 8), "t.wpe.weight": (16, 8), **{f"t.h.{k}.w.weight": (8, 8) for k in range(2)}}
    sparse_file(tmp_path / "m.safetensors", shapes)
    found = advice_as_fields(capsys, "m.safetensors", "--tokens", "8", "--memory", "64MiB")
    line = next(line for line in found["lines"] if line.startswith("model = "))
    assert "blocks=['t.wte', 't.wpe', 't.h']" in line
    assert found["layers"] == 3


WRONG: dict[str, tuple[Callable[[str], list[str]], str]] = {
    "no such path": (lambda m: ["nowhere", "--tokens", "8", "--memory", "1GiB"], "WHAT"),
    "no such module": (lambda m: ["nowhere:f", "--tokens", "8", "--memory", "1GiB"], "WHAT"),
    "no such function": (lambda m: [f"{m}:f", "--tokens", "8", "--memory", "1GiB"], "WHAT"),
    "no function": (lambda m: [f"{m}:constant", "--tokens", "8", "--memory", "1GiB"], "WHAT"),
    "arguments": (lambda m: [f"{m}:needs", "--tokens", "8", "--memory", "1GiB"], "depth"),
    "values": (lambda m: [f"{m}:values", "--tokens", "8", "--memory", "1GiB"], "meta device"),
    "no parameters": (lambda m: [f"{m}:nothing", "--tokens", "8", "--memory", "1GiB"], "parameters"),
    "no layers": (lambda m: [f"{m}:number", "--tokens", "8", "--memory", "1GiB"], "WHAT"),
    "an empty directory": (lambda m: ["empty", "--tokens", "8", "--memory", "1GiB"], "WHAT"),
    "no safetensors": (lambda m: [f"{m}.py", "--tokens", "8", "--memory", "1GiB"], "WHAT"),
    "a missing field": (lambda m: ["partly/config.json", "--tokens", "8", "--memory", "1GiB"], "intermediate_size"),
    "no configuration": (lambda m: ["other/config.json", "--tokens", "8", "--memory", "1GiB"], "model_type"),
    "no size": (lambda m: [f"{m}:layers", "--tokens", "8", "--memory", "much"], "--memory"),
    "no tokens": (lambda m: [f"{m}:layers", "--tokens", "0", "--memory", "1GiB"], "--tokens"),
    "positions": (lambda m: [f"{m}:layers", "--tokens", "8", "--positions", "3", "--memory", "1GiB"], "--positions"),
    "input": (lambda m: [f"{m}:layers", "--tokens", "8", "--input", "8,x", "--memory", "1GiB"], "--input"),
    "rows of the input": (lambda m: [f"{m}:layers", "--tokens", "8", "--input", "3,2", "--memory", "1GiB"], "--input"),
    "micro-batches": (
        lambda m: [f"{m}:layers", "--tokens", "8", "--microbatches", "2", "--memory", "1GiB"],
        "--microbatches",
    ),
    "optimizer": (lambda m: [f"{m}:layers", "--tokens", "8", "--optimizer", "Fast", "--memory", "1GiB"], "--optimizer"),
    "device": (lambda m: [f"{m}:layers", "--tokens", "8", "--device", "abacus", "--memory", "1GiB"], "--device"),
}


@pytest.mark.parametrize("case", WRONG)
def test_bad_input_is_one_line_that_names_the_argument(
    builders: str, case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder, fields in (("empty", None), ("partly", {"model_type": "llama", "hidden_size": 8}), ("other", {"a": 1})):
        (tmp_path / folder).mkdir()
        if fields is not None:
            (tmp_path / folder / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    make, named = WRONG[case]
    assert main(make(builders)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert named in captured.err


@pytest.mark.usefixtures("rates_given")
def test_states_of_fewer_bytes_take_less_of_home_buffers_and_time(
    builders: str, capsys: pytest.CaptureFixture[str]
) -> None:
    how = (f"{builders}:layers", "--tokens", "256", "--memory", "64MiB")
    full, small = (advice_as_fields(capsys, *how, "--states", states) for states in ("full", "8bit"))
    assert full["home_bytes"] - small["home_bytes"] == pytest.approx(
        2 * (1 - (1 + 1 / 64) / 4) * 4 * full["parameters"], rel=0.01
    )
    least = [next(limit for limit in found["limits"] if limit["name"] == "least") for found in (full, small)]
    assert least[1]["seconds"] <= least[0]["seconds"]
    assert 'torch.optim.AdamW, states="8bit", lr=1e-3' in small["lines"][-1]
    names: dict[str, Any] = {}
    exec("\n".join(small["lines"]), names)
    names["model"].close()


#: Forms of fewer bytes, as their arguments, and the bytes of a parameter that a step of Adam without clipping moves.
BYTES_MOVED = {
    ("full", "full", "full"): 36,
    ("full", "full", "bfloat16"): 28,
    ("full", "full", "8bit"): 24 + 1 / 16,
    ("split", "full", "full"): 34,
    ("bfloat16", "full", "full"): 30,
    ("full", "bfloat16", "full"): 32,
    ("bfloat16", "bfloat16", "8bit"): 14 + 1 / 16,
}


def test_where_the_disk_is_the_bound_each_form_of_fewer_bytes_is_offered_with_its_seconds_bytes_and_lines(
    builders: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("deep.py").write_text(
        "from torch import nn\ndef layers(): return [nn.Linear(512, 512, bias=False) for _ in range(12)]\n", "utf-8"
    )
    slow = replace(RATES, read_bytes=1e7, write_bytes=1e7, states_read_bytes=1e7, states_write_bytes=1e7)
    monkeypatch.setattr("offload.advise.__main__.measure_rates", lambda *args, **kwargs: slow)
    monkeypatch.setattr(
        "offload.advise.__main__.measure_optimizer",
        lambda name, states, weights=None: replace(ADAMW, form=form_of(states)),
    )
    how = ("deep:layers", "--tokens", "8", "--memory")
    limits = {limit["name"]: limit for limit in advice_as_fields(capsys, *how, "1GiB")["limits"]}
    given = f"{limits['least']['limit_bytes'] + (4 << 20)}"  # conversions take buffers
    found = advice_as_fields(capsys, *how, given)
    assert {limit["name"]: limit for limit in found["limits"]}["given"]["bound"] in ("reading", "writing")
    forms = {(each["store_dtype"], each["gradient_dtype"], each["states"]): each for each in found["forms"]}
    exact = forms["full", "full", "full"]
    assert exact["lines"] == found["lines"]
    assert [*forms] == [*BYTES_MOVED]
    for form, each in forms.items():
        most = BYTES_MOVED[form] * found["parameters"]
        assert 0.6 * most <= each["moved_bytes"] < most  # some of it stays in slots and in memory
        # Weights in a form cannot rest in memory where layers compute in float32, and are loaded instead.
        assert each["seconds"] < exact["seconds"] or each is exact or form[1:] == ("full", "full")
        assert each["home_bytes"] <= exact["home_bytes"]
        names: dict[str, Any] = {}
        exec("\n".join(each["lines"]), names)
        names["model"](torch.zeros(1, 512)).sum().backward()
        names["optimizer"].step()
        names["model"].close()
    assert main([*how, given]) == 0
    shown = capsys.readouterr().out
    assert "the disk is the bound" in shown
    assert 'store_dtype=torch.bfloat16, gradient_dtype=torch.bfloat16, states="8bit"' in shown
    assert advice_as_fields(capsys, *how, "1GiB")["forms"] == []  # all of it in memory


def test_states_that_a_class_cannot_store_are_refused_in_one_line(
    builders: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offload.advise.__main__.measure_rates", lambda *args, **kwargs: RATES)
    how = [f"{builders}:layers", "--tokens", "8", "--memory", "1GiB", "--optimizer", "Adafactor", "--states", "8bit"]
    assert main(how) == 2
    assert "Adafactor updates a matrix differently" in capsys.readouterr().err


def test_a_missing_argument_is_one_line() -> None:
    command = [sys.executable, "-m", "offload.advise", "x", "--tokens", "8"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1
    assert "--memory" in ended.stderr


# --- what is measured ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "states"), [("AdamW", 2), ("SGD", 0), ("Adagrad", 1), ("Adafactor", 0)])
def test_states_of_an_optimizer_are_counted_by_running_it(name: str, states: int) -> None:
    assert measure_optimizer(name).states == pytest.approx(states, abs=1 if name == "Adafactor" else 0)


@pytest.mark.parametrize(("states", "each"), [("8bit", (1 + 1 / 64) / 2), (torch.bfloat16, 1)])
def test_states_of_fewer_bytes_are_measured_as_they_are_stored(states: Any, each: float) -> None:
    found = measure_optimizer("AdamW", states, "split")
    assert found.states == each
    assert found.bytes_per_second > 0


def test_rates_are_positive_and_the_file_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offload.advise.rates.SECONDS_EACH", 0.0)
    monkeypatch.setattr("offload.advise.rates.FILE_BYTES", 1 << 20)
    rates = measure_rates(
        torch.device("cpu"),
        torch.float32,
        width=64,
        tokens=64,
        home=tmp_path / "not" / "yet",
        home_bytes=1 << 60,
        state_bytes=0,
    )
    assert min(rates.flops, rates.touched_bytes, rates.read_bytes, rates.write_bytes) > 0
    assert rates.direct
    assert not list(tmp_path.iterdir())
