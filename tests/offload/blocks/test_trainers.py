"""The examples with trainers, on models that are built from configurations: results of the plain model under them.

Where transformers, sentence-transformers, accelerate or datasets are not installed, ``tests/with_transformers.sh`` runs
them in an environment of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gradcache import sentence_transformers as losses
from offload import OffloadModel, OffloadOptimizer
from tests.examples import EXAMPLES, load_example

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.filterwarnings("ignore")  # of the trainers themselves

KEYS = ("loss", "grad_norm")


def example(name: str, *needs: str) -> Any:
    for package in needs:
        pytest.importorskip(package, reason=f"needs {package}: tests/with_transformers.sh installs it")
    return load_example(name)


def trainer(name: str, *needs: str) -> Any:
    return pytest.fixture(lambda: example(name, *needs))


huggingface = trainer("huggingface_trainer", "transformers", "accelerate")
loop = trainer("training_loop", "transformers")
lightning = trainer("lightning_trainer", "lightning")
sentences = trainer("sentence_transformers_trainer", "sentence_transformers", "accelerate", "datasets")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


def assert_equal(model: Any, other: Any, *, exact: bool = True) -> None:
    found, expected = model.state_dict(), other.state_dict()
    assert list(found) == list(expected)
    for name, value in found.items():
        assert torch.equal(value, expected[name]) if exact else torch.allclose(value, expected[name], atol=1e-5), name


# --- the Trainer of transformers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"optim": "sgd", "bf16": True}], ids=str)
def test_the_trainer_s_steps_are_those_of_the_plain_model(
    options: dict[str, Any], huggingface: Any, home: Path, tmp_path: Path
) -> None:
    plain = huggingface.train(tmp_path / "plain", None, save_strategy="no", **options)
    ours = huggingface.train(tmp_path / "ours", home, save_strategy="no", **options)
    assert isinstance(ours.model, OffloadModel)
    assert isinstance(ours.optimizer.optimizer, OffloadOptimizer)
    assert [len(g["params"]) for g in ours.optimizer.param_groups] == [
        len(g["params"]) for g in plain.optimizer.param_groups
    ]
    exact = options.get("optim") == "sgd"  # Adam divides by small numbers, and rounds as its vectors are cut
    found, norms = ([[step.get(key, 0.0) for step in t.state.log_history] for t in (ours, plain)] for key in KEYS)
    for ours_then, plain_then in (found, norms):
        assert ours_then == (plain_then if exact else pytest.approx(plain_then, rel=1e-4))
    assert_equal(ours.model, plain.model, exact=exact)


def test_checkpoints_of_the_plain_model_and_of_ours_are_exchanged(huggingface: Any, home: Path, tmp_path: Path) -> None:
    plain = huggingface.train(tmp_path / "plain", None)
    huggingface.train(tmp_path / "first", None, steps=3)
    ours = huggingface.train(tmp_path / "first", home, resume=True)
    assert_equal(ours.model, plain.model, exact=False)
    huggingface.train(tmp_path / "second", home, steps=3)
    back = huggingface.train(tmp_path / "second", None, resume=True)
    assert_equal(back.model, plain.model, exact=False)


def test_adapters_train_evaluate_and_resume_under_the_trainer(huggingface: Any, home: Path, tmp_path: Path) -> None:
    peft: Any = pytest.importorskip("peft", reason="needs peft: tests/with_transformers.sh installs it")

    def adapted(home: Path | None) -> Any:
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], lora_dropout=0.1)
        model = peft.get_peft_model(huggingface.llama(None), config)
        if home is None:
            return model
        blocks = "base_model.model.model.layers"
        return OffloadModel(model, "cpu", home, checkpoint_activation=True, blocks=blocks)

    run = partial(huggingface.train, model=adapted, optim="sgd")
    plain, whole = run(tmp_path / "plain", None), run(tmp_path / "whole", home)
    assert_equal(whole.model, plain.model)
    assert whole.evaluate(huggingface.rows(8))["eval_loss"] == plain.evaluate(huggingface.rows(8))["eval_loss"]
    run(tmp_path / "parts", home, steps=3)
    resumed = run(tmp_path / "parts", home, resume=True)
    assert_equal(resumed.model, whole.model)
    saved = {path.name for path in (tmp_path / "parts" / "checkpoint-6").iterdir()}
    assert "adapter_model.safetensors" in saved
    assert "model.safetensors" not in saved


# --- a plain loop ----------------------------------------------------------------------------------------------------


def test_a_resumed_loop_continues_bit_for_bit(loop: Any, home: Path, tmp_path: Path) -> None:
    whole, expected = loop.train(home, tmp_path / "whole")
    _, first = loop.train(home, tmp_path / "parts", until=3)
    resumed, second = loop.train(home, tmp_path / "parts")
    assert first + second == expected
    assert_equal(resumed, whole)


# --- the Trainer of Lightning ----------------------------------------------------------------------------------------


def test_automatic_optimization_trains_as_the_plain_module(lightning: Any, home: Path) -> None:
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    plain, _ = lightning.train(None, **options)
    ours, trainer = lightning.train(home, **options)
    assert isinstance(trainer.optimizers[0], OffloadOptimizer)
    assert ours.losses == plain.losses
    assert_equal(ours, plain)


def test_a_resumed_lightning_module_continues_bit_for_bit(lightning: Any, home: Path, tmp_path: Path) -> None:
    whole, _ = lightning.train(home)
    for before, after in ((home, home), (None, home), (home, None)):  # checkpoints are those of the plain module
        first, trainer = lightning.train(before, steps=3)
        trainer.save_checkpoint(tmp_path / "checkpoint.ckpt")
        second, _ = lightning.train(after, tmp_path / "checkpoint.ckpt")
        assert first.losses + second.losses == whole.losses
        assert_equal(second, whole)


# --- what libraries save ---------------------------------------------------------------------------------------------


def _loaded(folder: Path) -> dict[str, torch.Tensor]:
    (file,) = folder.glob("*.safetensors")
    return load_file(file)


def _by_its_state(model: Any, folder: Path) -> None:
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True)
    accelerator.prepare(model)
    accelerator.save_state(folder)


def _by(package: str, name: str, file: str = "") -> Any:
    return lambda model, folder: getattr(pytest.importorskip(package), name)(model, folder / file)


SAVERS: dict[str, Any] = {
    "accelerate's save_model": lambda model, folder: (
        pytest.importorskip("accelerate").Accelerator(cpu=True).save_model(model, folder)
    ),
    "accelerate's save_state": _by_its_state,
    "safetensors' save_model": _by("safetensors.torch", "save_model", "model.safetensors"),
    "hub's save_torch_model": _by("huggingface_hub", "save_torch_model"),
    "save_pretrained": lambda model, folder: model.save_pretrained(folder),
}


@pytest.mark.parametrize("part", ["the model", "a part"])
@pytest.mark.parametrize("saver", SAVERS)
def test_libraries_save_every_weight_of_the_last_step(
    saver: str, part: str, huggingface: Any, home: Path, tmp_path: Path
) -> None:
    """Of tied weights one, as of the plain model."""
    plain = huggingface.llama(None, dropout=0.0)
    net = huggingface.llama(None, dropout=0.0)
    model = OffloadModel(net, "cpu", home, checkpoint_activation=True, blocks="model.layers")
    model._homes.keep_in_memory([0])  # weights of the others are in files
    rows = torch.arange(12).view(2, 6)
    for each, optimizer in (
        (plain, torch.optim.SGD(plain.parameters(), lr=0.5)),
        (model, OffloadOptimizer(model, torch.optim.SGD, lr=0.5)),
    ):
        each(input_ids=rows, labels=rows).loss.backward()
        optimizer.step()
    found: Any = net.model if part == "a part" else model
    for each, folder in ((found, tmp_path / "ours"), (plain.model if part == "a part" else plain, tmp_path / "plain")):
        folder.mkdir()
        SAVERS[saver](each, folder)
    saved, expected = _loaded(tmp_path / "ours"), _loaded(tmp_path / "plain")
    assert saved.keys() == expected.keys()
    torch.testing.assert_close(saved, expected, rtol=0, atol=0)


# --- the trainer of sentence-transformers ----------------------------------------------------------------------------


def test_a_sentence_transformer_trains_as_the_plain_one(sentences: Any, home: Path, tmp_path: Path) -> None:
    folder = sentences.model_in(tmp_path / "bert", dropout=0.0)
    loss = partial(losses.CachedMultipleNegativesRankingLoss, mini_batch_size=4)
    run = partial(sentences.train, folder, make_loss=loss, steps=3, kind=torch.optim.SGD)
    plain = run(tmp_path / "plain", None, save_strategy="no")
    ours = run(tmp_path / "ours", home, save_strategy="no")
    found = [[step["loss"] for step in t.state.log_history if "loss" in step] for t in (plain, ours)]
    assert len(found[0]) == 3
    assert found[0] == pytest.approx(found[1], rel=1e-4)
    assert_equal(ours.model, plain.model, exact=False)
    transformer = ours.model[0].model
    assert isinstance(transformer, OffloadModel)
    assert transformer.statistics().shard_loads <= 3 * 2 * 4


# --- several processes -----------------------------------------------------------------------------------------------


def test_both_trainers_on_a_mesh_train_as_one_process_with_all_rows(
    huggingface: Any, sentences: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    on_a_mesh = example("trainers_on_a_mesh")
    (tmp_path / "plain").mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    script = str(EXAMPLES / "trainers_on_a_mesh.py")
    ended = subprocess.run(
        [*command, script, str(tmp_path)], capture_output=True, text=True, env=environment, timeout=200
    )
    assert ended.returncode == 0, ended.stderr
    expected = {"Trainer": on_a_mesh.train_llama(None, tmp_path / "plain" / "llama", None)}
    # The words of a tokenizer that is trained again may be numbered differently.
    bert = str(tmp_path / "bert")
    expected["SentenceTransformerTrainer"] = on_a_mesh.train_bert(None, tmp_path / "plain" / "run", None, bert)
    found = {
        line.split()[0]: [float(x) for x in line.split()[1:]]
        for line in ended.stdout.splitlines()
        if "Trainer " in line
    }
    assert all(len(values) == 12 for values in expected.values())
    assert found == {name: pytest.approx(values, rel=1e-4) for name, values in expected.items()}
    assert len(list((tmp_path / "llama" / "checkpoint").glob("*.distcp"))) == 2


@pytest.mark.parametrize("trainer", ["huggingface", "loop", "lightning", "sentences"])
def test_the_examples_run(trainer: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    found = request.getfixturevalue(trainer).main(tmp_path)
    assert len(found) == 6
    assert found[-1] < found[0]
