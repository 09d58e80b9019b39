"""What every method trains: the same blocks, batches, loss and hyperparameters. Plain torch, for peers too."""

from dataclasses import dataclass

from torch import Tensor

from benchmarks.models.transformer import Stack, State

STEPS = "steps"
REFERENCE, DISK, FROM_META, DEEPSPEED = "resident", "disk", "from meta", "deepspeed"
NAMES = {
    REFERENCE: "resident, checkpointed, fused AdamW",
    DISK: "on disk",
    FROM_META: "on disk, from birth",
    DEEPSPEED: "DeepSpeed ZeRO-3, NVMe",
}


@dataclass(frozen=True)
class Training(Stack):
    """A stack of blocks and how it is trained; ``graphs`` (MiB) and ``slots`` are ours."""

    dropout: float = 0.1
    learning_rate: float = 1e-4
    weight_decay: float = 0.01
    max_norm: float = 1.0
    graphs: int = 512
    slots: int = 3

    @property
    def options(self) -> dict[str, float]:
        """Of AdamW."""
        return {"lr": self.learning_rate, "weight_decay": self.weight_decay}


def loss_of(output: State, target: Tensor) -> Tensor:
    """Squared distance of each token, on average. Its gradient is far longer than 1: clipping always clips."""
    return (output[0] - target).square().sum(dim=-1).mean()
