"""The trainers of transformers and of sentence-transformers in several processes, which share one model.

    torchrun --standalone --nproc-per-node 2 docs/examples/trainers_on_a_mesh.py FOLDER

The Llama and the BERT of the examples for one process train on the rows of all processes together: losses, norms and
weights are those of one process whose batch is as large as theirs. Checkpoints are those of
``torch.distributed.checkpoint``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import huggingface_trainer as huggingface
import sentence_transformers_trainer as sentences
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from gradcache.sentence_transformers import CachedMultipleNegativesRankingLoss
from offload import OffloadModel


def llama(mesh: DeviceMesh | None, home: Path | None) -> Any:
    """A Llama; of one on a mesh, this process stores a part in ``home``."""
    model = huggingface.llama(None, dropout=0.0)
    if mesh is None:
        return model
    return OffloadModel(model, "cpu", home, checkpoint_activation=True, blocks="model.layers", mesh=mesh)


def bert(mesh: DeviceMesh | None, folder: str, home: Path | None) -> Any:
    """A SentenceTransformer; of one on a mesh, this process stores a part of the transformer in ``home``."""
    if mesh is None:
        return sentences.sentence_transformer(folder, None)
    model = sentences.sentence_transformer(folder, home, mesh=mesh)
    # Its transformer says the same by itself: the trainer must not wrap it, since the gradients are reduced.
    model.is_distributed_loading_by_transformers = True
    return model


def logged(trainer: Any) -> list[float]:
    """The loss of each step, and the norm of its gradients."""
    return [step[key] for step in trainer.state.log_history if "loss" in step for key in ("loss", "grad_norm")]


def train_llama(mesh: DeviceMesh | None, output: Path, home: Path | None, rows: int = 8) -> list[float]:
    """Some steps on ``rows`` rows each, of all processes together."""
    trainer = huggingface.train(
        output,
        home,
        model=lambda home: llama(mesh, home),
        per_device_train_batch_size=rows // (1 if mesh is None else mesh.size()),
        save_strategy="no",
    )
    if mesh is not None:
        names, states = ("model", "optimizer"), get_state_dict(trainer.model, trainer.optimizer.optimizer)
        dcp.save(dict(zip(names, states, strict=True)), checkpoint_id=output / "checkpoint")
    return logged(trainer)


def train_bert(mesh: DeviceMesh | None, output: Path, home: Path | None, folder: str, rows: int = 16) -> list[float]:
    """The same of contrastive training: the negatives of each text are the texts of all processes."""
    gathers = mesh is not None
    trainer = sentences.train(
        folder,
        output,
        home,
        lambda model: CachedMultipleNegativesRankingLoss(model, mini_batch_size=4, gather_across_devices=gathers),
        make_model=lambda folder, home: bert(mesh, folder, home),
        per_device_train_batch_size=rows // (1 if mesh is None else mesh.size()),
        save_strategy="no",
    )
    return logged(trainer)


def main(folder: Path) -> None:
    """Trains both, and prints what the first process found."""
    mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
    if mesh.get_rank() == 0:
        (folder / "home").mkdir()
        sentences.model_in(folder / "bert", dropout=0.0)
    dist.barrier()
    found = {
        "Trainer": train_llama(mesh, folder / "llama", folder / "home"),
        "SentenceTransformerTrainer": train_bert(mesh, folder / "run", folder / "home", str(folder / "bert")),
    }
    for name, values in found.items() if mesh.get_rank() == 0 else ():
        print(name, *values)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
