"""Loops that every form of a model runs as the plain one does: what any ``nn.Module`` allows between two steps."""

from __future__ import annotations

from typing import Any

from tests.offload.fuzz.around import ChunkedStep
from tests.offload.fuzz.corpus import TRAIN
from tests.offload.fuzz.gradients import Clip, KeepGradients, Step, TrainStep, UseKept, ZeroGrad
from tests.offload.fuzz.hooks import Hook, RemoveHooks
from tests.offload.fuzz.passes import Backward, Forward, Grad
from tests.offload.fuzz.program import Program, Setup, Statement
from tests.offload.fuzz.weights import Average, Checkpoint, Copy, Freeze, LoadState, SaveState, SetMode, Write

LOOPS: dict[str, tuple[Statement, ...]] = {
    "two forwards before one backward": (Forward(), Forward(seed=1), Backward((0, 1))),
    "backwards in the other order": (Forward(), Forward(seed=1), Backward((1,)), Backward((0,))),
    "a retained graph": (Forward(), Backward(retain=True), Forward(seed=1), Backward((1,)), Backward()),
    "gradients that accumulate and are zeroed": (
        *(TrainStep(), *TRAIN, ZeroGrad(set_to_none=False), *TRAIN, ZeroGrad("loop", False), *TRAIN),
        *(ZeroGrad(), *TRAIN, *TRAIN),
    ),
    "gradients that are kept": (*TRAIN, KeepGradients(), ZeroGrad(), *TRAIN, UseKept(), ZeroGrad(set_to_none=False)),
    "gradients of the input": (Forward(x_grad=True), Backward(), Forward(x_grad=True), Grad(of="x")),
    "gradients that are asked for": (Forward(), Grad(retain=True), Grad(of="last", retain=True), Grad(of="first")),
    "a backward of given parameters": (
        *(Forward(), Backward(inputs="last", retain=True), Backward(inputs="first", retain=True)),
        Backward(inputs="all"),
    ),
    "evaluations between steps": (
        *(*TRAIN, Step(), Forward(mode="no_grad"), Forward(mode="eval"), Forward(mode="inference")),
        *(Forward(mode="eval_grad"), Backward(), *TRAIN),
    ),
    "a mode that changes before the backward": (Forward(), SetMode(), Backward(), SetMode(train=True), *TRAIN),
    "saved tensors on the CPU": (Forward(mode="save_on_cpu"), Backward()),
    "parameters that freeze and thaw": (
        *(*TRAIN, Freeze(), *TRAIN, Step(), Freeze(None), Freeze(3, on=True), *TRAIN, Step(), ZeroGrad()),
        *(*TRAIN, Freeze(None, on=True), *TRAIN, Step(), ZeroGrad(), Freeze(0), TrainStep()),
    ),
    "clipped steps": (*TRAIN, Clip(), Step(), ZeroGrad(), TrainStep(), TrainStep()),
    "hooks of parameters": (
        *(Hook(does="scale", at=None), Hook("accumulated", "scale", None), *TRAIN, *TRAIN, RemoveHooks(), *TRAIN),
    ),
    "hooks of layers": (Hook("forward", "scale"), Hook("forward_pre", at=2), *TRAIN, RemoveHooks(), *TRAIN),
    "a state that is saved and loaded": (*TRAIN, SaveState(), Step(), LoadState(), *TRAIN),
    "a checkpoint that is saved and loaded": (
        *(TrainStep(), Checkpoint(), TrainStep(), Checkpoint(load=True), TrainStep()),
    ),
    "chunked steps": (
        *(ChunkedStep(), ChunkedStep(seed=1, bare=True), ZeroGrad(set_to_none=False), ChunkedStep(seed=1), Step()),
    ),
    "a copy": (Hook("forward", "scale", None), *TRAIN, Copy(), *TRAIN, Step(), Forward()),
    "a pickle": (*TRAIN, Copy("pickle"), *TRAIN, Step(), Forward()),
    "average weights": (
        *(TrainStep(), Average(), TrainStep(), Average(), Forward(), Average("swap"), Forward(mode="eval")),
        *(Average("swap"), Backward()),
    ),
    "weights that are written between inferences": tuple(
        statement
        for how in ("in_place", "data", "data_copy", "data_mul", "numpy", "vector", "state_dict", "set", "swap")
        for statement in (Forward(mode="no_grad"), Write(how))
    ),
    "weights that are written": (Write("in_place", 0), *TRAIN, Write("data_copy"), *TRAIN, Step(), *TRAIN),
}

FORMS: dict[str, dict[str, Any]] = {
    "a Sequential in memory": {"model": "dropout", "checkpoint": True},
    "a Sequential in files": {"model": "batchnorm", "home": "disk", "checkpoint": True, "boundary": 0, "late": 1},
    "a Sequential whose graphs are kept": {"model": "inplace", "home": "disk"},
    "tied layers": {"model": "tied", "home": "disk", "checkpoint": True},
    "two blocks a shard in files": {"model": "blocks", "slices": 2, "home": "disk", "checkpoint": True, "late": 1},
    "blocks whose graphs are kept": {"model": "blocks_normed"},
    "blocks that are called without gradients": {"model": "blocks_fixed", "home": "disk", "checkpoint": True},
    "modules around blocks that stream": {"model": "blocks_all", "home": "disk", "checkpoint": True, "slices": 5},
    "two lists of blocks in another order": {"model": "blocks_dabc", "slices": 2, "checkpoint": True},
    "some shards and gradients in memory": {
        "model": "blocks",
        "home": "disk",
        "checkpoint": True,
        "planned": (3000, 1 << 20),
        "updates": "offload",
    },
    "resident adapters": {"model": "blocks_lora", "home": "disk", "checkpoint": True, "resident": ("*.down", "*.up")},
    "a model that rests on a device": {
        "model": "dropout",
        "home": "disk",
        "checkpoint": True,
        "device": 1 << 20,
        "updates": "offload",
    },
}


def loop(name: str, form: str) -> Program:
    """One of :data:`LOOPS` of a model in one of :data:`FORMS`."""
    return Program(Setup(**FORMS[form]), LOOPS[name])
