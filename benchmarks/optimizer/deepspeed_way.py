"""The peer: DeepSpeed ZeRO-3 with parameters and optimizer on NVMe, trained by the same loop.

Imported in the environment that has DeepSpeed, and by nothing else. One process, gloo, fp32 throughout; its optimizer
is its own compiled AdamW for the CPU, and its files are read and written through its own asynchronous I/O library,
which is compiled at the first use (libaio's headers, a compiler and ninja are needed). Each block is checkpointed by
torch, as in the other ways (ZeRO-3 fetches a block's parameters again when the block is recomputed), unless it is to
keep its activations.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.frame.child import Report
from benchmarks.optimizer.shape import Shape, loss_of, parameters_of_block
from benchmarks.optimizer.steps import FLOOR, run_way
from benchmarks.optimizer.ways import Way
from benchmarks.retrieval.encoder import State

__all__ = ["train"]


def train(
    report: Report,
    shape: dict[str, Any],
    home: str,
    save_after: int,
    save_to: str | None = None,
    checkpointed: bool = True,
) -> dict[str, Any] | None:
    """The rung, as :func:`benchmarks.optimizer.steps.train`; ``checkpointed``: whether blocks are recomputed."""
    os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))  # ninja
    if shutil.which("ninja") is None or shutil.which("c++") is None:
        report.skip("its I/O library is compiled at the first use, and there is no ninja or no C++ compiler")
        return None
    import deepspeed

    if not deepspeed.ops.op_builder.AsyncIOBuilder().is_compatible(verbose=False):
        report.skip("its I/O library cannot be compiled here; install the headers of libaio (libaio-dev)")
        return None
    report.memory(FLOOR)
    chosen = Shape(**shape)
    return run_way(report, ZeroOnDisk(chosen, Path(home), checkpointed), save_after, save_to)


class _Blocks(nn.Module):
    """The blocks as one module, which is what DeepSpeed takes."""

    def __init__(self, blocks: list[nn.Module], checkpointed: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.checkpointed = checkpointed

    def forward(self, state: State, target: Tensor) -> Tensor:
        for block in self.blocks:
            state = checkpoint(block, state, use_reentrant=False) if self.checkpointed else block(state)
        return loss_of(state, target)


class ZeroOnDisk(Way):
    """ZeRO-3 of one process."""

    def __init__(self, shape: Shape, home: Path, checkpointed: bool = True) -> None:
        import deepspeed

        super().__init__(shape, home)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
        settings = self._settings()
        with deepspeed.zero.Init(config_dict_or_path=settings):
            model = _Blocks(shape.model(), checkpointed)
        # What a block changes after its layers were made is lost on parameters that are partitioned by then.
        for k, block in enumerate(model.blocks):
            parameters = list(block.parameters())
            with torch.no_grad(), deepspeed.zero.GatheredParameters(parameters, modifier_rank=0):
                for parameter, value in zip(parameters, shape.block(k).parameters(), strict=True):
                    parameter.copy_(value)
        self.engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)

    def _settings(self) -> dict[str, Any]:
        largest = 4 * self.shape.dim**2  # elements of the widest matrix
        block = parameters_of_block(self.shape.dim)
        on_disk = {"device": "nvme", "nvme_path": str(self.home), "pin_memory": False}
        return {
            "train_micro_batch_size_per_gpu": self.shape.rows,
            "gradient_clipping": self.shape.max_norm,
            "optimizer": {
                "type": "AdamW",
                "params": {"lr": self.shape.learning_rate, "weight_decay": self.shape.weight_decay},
            },
            "zero_optimization": {
                "stage": 3,
                "offload_param": {**on_disk, "buffer_count": 16, "buffer_size": largest},
                "offload_optimizer": {**on_disk, "buffer_count": 4},
                # What our engine holds as well: about two blocks.
                "stage3_max_live_parameters": 2 * block,
                "stage3_max_reuse_distance": 2 * block,
                "stage3_prefetch_bucket_size": block,
                "reduce_bucket_size": block,
                "sub_group_size": block,
            },
            "aio": {"block_size": 1 << 20, "queue_depth": 16, "thread_count": 1, "overlap_events": True},
        }

    def step(self, state: State, target: Tensor) -> float:
        """Clipping is the engine's."""
        loss = self.engine(state, target)
        self.engine.backward(loss)
        self.engine.step()
        return float(loss.item())

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Gathered one after the other."""
        import deepspeed

        for name, parameter in self.engine.module.blocks.named_parameters():
            with deepspeed.zero.GatheredParameters(parameter):
                yield name, parameter.detach().clone()
