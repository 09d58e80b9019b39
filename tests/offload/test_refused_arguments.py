"""What cannot be is refused at construction: the error names the argument, and nothing was changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from offload import MemoryPolicy, OffloadModel, OffloadOptimizer
from tests.offload import quantised
from tests.offload.blocks.towers import make
from tests.offload.zoo import OwnForward, build

BF16 = torch.bfloat16
BLOCKS = "encoder.layer"
WITHOUT_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")


def linear() -> nn.Sequential:
    return build(["linear"])


def own_forward() -> nn.Module:
    return OwnForward([*linear()])


def twice() -> nn.Module:
    bare = make(3)
    bare.encoder.layer.append(bare.encoder.layer[0])
    return bare


def tied() -> nn.Module:
    bare = make()
    bare.norm.weight = bare.encoder.layer[0].norm.weight
    return bare


def nested() -> nn.Module:
    bare = make()
    bare.encoder.layer[0].below = bare.encoder.layer[1]
    return bare


def scripted() -> nn.Module:
    bare = make()
    bare.encoder.layer[1] = torch.jit.script(nn.Linear(4, 4))
    return bare


#: What makes a model, what it is offloaded with, and how that is refused.
MODELS: list[Any] = [
    (lambda: nn.Linear(2, 2), {}, TypeError, "expected a model with a list of blocks of one class, got Linear"),
    (nn.Sequential, {}, ValueError, "at least one layer"),
    (list, {}, TypeError, "got list"),
    (linear, {"device": "gpu"}, TypeError, "device='gpu'"),
    (linear, {"device": None}, TypeError, "device=None"),
    (linear, {"device": "meta"}, ValueError, "CPU or CUDA"),
    pytest.param(linear, {"device": 0}, ValueError, "no CUDA device; pass device='cpu'", marks=WITHOUT_CUDA),
    (linear, {"offload_device": "disk"}, ValueError, "offload_device, got 'disk'; .*such as './disk'"),
    (linear, {"offload_device": "cuda"}, ValueError, "'cpu' or a directory"),
    (linear, {"offload_device": None}, TypeError, "NoneType"),
    (linear, {"offload_device": 3.0}, TypeError, "offload_device=3.0"),
    (linear, {"num_slices": 9}, ValueError, "from 1 to 3 slices .* num_slices=9"),
    (linear, {"num_slices": 0}, ValueError, "num_slices=0"),
    (linear, {"num_slices": "2"}, TypeError, "num_slices='2'"),
    (linear, {"num_microbatches": 0}, ValueError, "num_microbatches=0"),
    (linear, {"num_microbatches": 1.5}, ValueError, "num_microbatches=1.5"),
    (linear, {"num_microbatches": None}, ValueError, "num_microbatches=None"),
    (linear, {"memory": "much"}, ValueError, "memory='much'"),
    (
        *(linear, {"memory": MemoryPolicy.fixed(graph_bytes="1MiB"), "checkpoint_activation": False}),
        *(ValueError, "graph_bytes needs checkpoint_activation=True"),
    ),
    (linear, {"resident": "*.lora_*"}, ValueError, "matches none"),
    (linear, {"resident": 3}, TypeError, "patterns of parameter names"),
    (lambda: quantised.layers("subclass"), {"resident": "*.base.weight.*"}, ValueError, "is quantised"),
    (linear, {"store_dtype": "half"}, ValueError, "None .*, torch.bfloat16 or 'split', got store_dtype='half'"),
    (linear, {"store_dtype": 16}, TypeError, "got int .store_dtype=16."),
    (lambda: linear().double(), {"store_dtype": "split"}, ValueError, "expected float32 parameters"),
    (lambda: [nn.Embedding(4, 4, sparse=True)], {"store_dtype": "split"}, ValueError, "expected dense gradients"),
    (linear, {"gradient_dtype": torch.float16}, ValueError, "gradient_dtype=torch.float16: float16 would overflow"),
    (linear, {"gradient_dtype": "bfloat16"}, TypeError, "got gradient_dtype='bfloat16'"),
    (linear, {"accumulate_in_gradient_dtype": True}, ValueError, "needs gradient_dtype=torch.bfloat16, got None"),
    (
        *(linear, {"gradient_dtype": BF16, "accumulate_in_gradient_dtype": 1}),
        *(TypeError, "accumulate_in_gradient_dtype=1"),
    ),
    # Lists of blocks.
    (make, {"blocks": "encoder.layers"}, ValueError, "its lists are encoder.layer"),
    (make, {"blocks": "encoder"}, TypeError, "got Encoder"),
    (make, {"blocks": nn.Conv2d}, ValueError, "Conv2d"),
    (make, {"blocks": 3}, TypeError, "blocks=3"),
    (make, {"blocks": []}, TypeError, r"blocks=\[\]"),
    (make, {"blocks": [BLOCKS, BLOCKS]}, ValueError, "each list of blocks once"),
    (make, {"blocks": BLOCKS, "num_slices": 5}, ValueError, "from 1 to 4 slices"),
    (twice, {"blocks": BLOCKS}, ValueError, r"layer\.0 and encoder\.layer\.3 are the same module"),
    (tied, {"blocks": BLOCKS}, ValueError, r"norm\.weight is tied to encoder\.layer\.0\.norm\.weight"),
    (nested, {"blocks": BLOCKS}, ValueError, r"layer\.1 is inside block encoder\.layer\.0; name lists that are apart"),
    (scripted, {"blocks": BLOCKS}, ValueError, r"block encoder\.layer\.1 is scripted"),
]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize(("make_it", "choices", "error", "match"), MODELS)
def test_a_model_that_cannot_be_is_refused(
    make_it: Callable[[], Any], choices: dict[str, Any], error: type[Exception], match: str
) -> None:
    model = make_it()
    before = [(p, p.data_ptr()) for p in nn.ModuleList([model] if isinstance(model, nn.Module) else model).parameters()]
    with pytest.raises(error, match=match):
        OffloadModel(model, **{"device": "cpu", **choices})
    now = nn.ModuleList([model] if isinstance(model, nn.Module) else model).parameters()
    assert all(p is q and p.data_ptr() == at for p, (q, at) in zip(now, before, strict=True))


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"optimizer_class": torch.optim.LBFGS}, TypeError, "needs a closure"),
        ({"optimizer_class": 3}, TypeError, "expected a class such as"),
        ({"optimizer_class": OffloadOptimizer}, TypeError, "expected a class such as"),
        ({"model": nn.Linear(1, 1)}, TypeError, "expected an OffloadModel"),
        ({"max_norm": 0.0}, ValueError, "expected a positive norm"),
        ({"max_norm": "1"}, TypeError, "expected a number"),
        ({"max_norm": 1.0, "update_in_backward": True}, ValueError, "exclude each other"),
        (
            {"model": OffloadModel(linear(), "cpu", gradient_dtype=BF16), "update_in_backward": True},
            *(ValueError, "model's gradient_dtype exclude each other"),
        ),
        ({"lr": -1.0}, ValueError, "Invalid learning rate"),
        ({"params": "*.bias"}, TypeError, "iterable of parameters or groups"),
        ({"params": [{"params": "*.bias"}]}, TypeError, "Tensor"),
        ({"params": [{"weight_decay": 0.1}]}, ValueError, "a group with the key 'params'"),
        ({"params": []}, ValueError, "at least one parameter"),
        ({"params": [nn.Parameter(torch.ones(1))]}, ValueError, "not among them"),
        ({"states": "4bit"}, ValueError, "expected None .*, torch.bfloat16 or '8bit', got states='4bit'"),
        ({"states": torch.float16}, ValueError, "got states=torch.float16"),
        ({"states": 8}, TypeError, "got int .states=8."),
    ],
)
def test_an_optimizer_that_cannot_be_is_refused(arguments: Any, error: type[Exception], match: str) -> None:
    given = {"model": OffloadModel(linear(), "cpu"), "optimizer_class": torch.optim.AdamW, **arguments}
    with pytest.raises(error, match=match):
        OffloadOptimizer(given.pop("model"), given.pop("optimizer_class"), **given)
