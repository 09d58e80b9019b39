"""Draws programs: setups, and statements one by one or in the phrases that loops are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from hypothesis import strategies as st

from tests.offload.fuzz import around, gradients, hooks, passes, weights
from tests.offload.fuzz.blocks import BLOCKS
from tests.offload.fuzz.models import MODELS, ROWWISE, WRITERS
from tests.offload.fuzz.program import Program, Setup, Statement
from tests.offload.fuzz.world import OPTIMIZERS

T = TypeVar("T")

seeds, flags = range(6), (False, True)
places = [0, 1, 2, 3, 5]
some = [None, *places]


def one(kind: type[T], /, **choices: Sequence[Any]) -> st.SearchStrategy[T]:
    """Makes one of a kind from the choices of each field."""
    return st.builds(kind, **{name: st.sampled_from(values) for name, values in choices.items()})


#: Models that stand for a mechanism that no other model needs.
TRICKY = ["table", "queries", "custom", "closure", "actnorm", "renormed", "routed", "double", "tied"]

setups = one(
    Setup,
    model=[*sorted(MODELS), *TRICKY, *TRICKY, *TRICKY, *sorted(BLOCKS), *sorted(BLOCKS)],
    home=["cpu", "disk", "disk", "kept"],
    checkpoint=flags,
    slices=[1, 2, 3, 4, 5, 6],
    slots=[2, 2, 3, 5],
    microbatches=[1, 1, 1, 2],
    boundary=[None, None, 0, 300],
    graphs=[None, None, 1500, 1 << 20],
    planned=[None, None, (0, 1 << 20), (3000, 0), (1 << 20, 1 << 20)],
    optimizer=[*sorted(OPTIMIZERS), *("sgd", "adamw") * 2],
    updates=["plain", "plain", "offload", "offload", "backward"],
    max_norm=[None, None, 0.5],
    grouped=[False, False, False, True],
    block_bytes=[8 << 20, 64, 300],
    late=[0, 0, 0, 1, 2, 3],
    trips=[False, False, True],
    looks=[True, True, True, False],
)

forwards = one(
    passes.Forward,
    seed=seeds,
    mode=["train", "train", "train", "no_grad", "eval", "eval_grad", "inference", "save_on_cpu"],
    rows=[4, 4, 6, 1],
    x_grad=flags,
)
recorded = one(passes.Forward, seed=seeds, x_grad=flags)
outputs = [(0,), (0,), (1,), (0, 1), (2,)]
losses = ["square", "sum", "first", "last"]
backwards = one(
    passes.Backward,
    which=outputs,
    loss=losses,
    retain=[False, False, True],
    create_graph=[*[False] * 7, True],
    inputs=[None, None, None, None, "all", "first", "last", "x"],
)
zeros = one(gradients.ZeroGrad, by=["model", "optimizer", "loop"], set_to_none=flags)
writes = one(
    weights.Write,
    how=["data", "data", "data_copy", "data_mul", "in_place", "vector", "swap", "numpy", "state_dict", "set"],
    at=some,
    seed=seeds,
)
hooked = one(
    hooks.Hook,
    on=["parameter", "accumulated", "forward", "forward_pre", "backward", "backward_pre", "output"],
    does=["log", "scale", "step"],
    at=some,
)
SWAPS = [
    *("module", "parameter", "weight_norm", "old_weight_norm", "spectral_norm"),
    *("lora", "tie", "no_bias", "forward", "remove"),
]
swaps = one(weights.Swap, how=SWAPS, at=places, seed=seeds)

#: Every kind of statement, each as likely as another.
SINGLE: list[st.SearchStrategy[Statement]] = [
    forwards,
    backwards,
    zeros,
    writes,
    hooked,
    swaps,
    one(passes.Grad, which=outputs, of=["all", "first", "last", "x"], retain=flags, loss=losses),
    one(passes.Penalty, of=["x", "all", ".grad"], seed=seeds, with_loss=flags),
    one(passes.Functional, kind=["call", "jvp", "vjp", "hvp", "func_jvp", "hessian", "func_grad"], seed=seeds),
    one(around.AuxiliaryLoss, seed=seeds),
    one(passes.Interrupt, where=["forward", "backward", "recomputation"], after=range(6), seed=seeds),
    one(around.ChunkedStep, seed=seeds, bare=flags, rows=[4, 6]),
    one(around.SetAside, seed=seeds, into=["old", "new", "none"]),
    one(around.Regularised, seed=seeds, first=flags),
    one(around.TiedAround, seed=seeds, at=places),
    one(around.Checkpointed, seed=seeds, reentrant=flags),
    one(passes.MutateInput),
    one(passes.MutateOutput),
    one(gradients.KeepGradients),
    one(gradients.UseKept, how=["assign", "kept", "copy", "fresh"]),
    one(gradients.Clip, by=["norm", "value"]),
    one(gradients.Step),
    one(gradients.TrainStep, seed=seeds, accumulate=[1, 2], set_to_none=flags),
    one(gradients.NewOptimizer),
    one(gradients.Rate, lr=[0.02, 0.1]),
    one(gradients.Look),
    one(weights.Average, do=["update", "update", "swap"]),
    one(weights.SaveState, how=["clone", "reference", "file"]),
    one(weights.LoadState, assign=flags, optimizer=flags),
    one(weights.Checkpoint, load=flags),
    one(weights.Copy, how=["deepcopy", "pickle"], aside=flags),
    one(weights.Reopen),
    one(weights.Freeze, at=some, on=flags),
    one(weights.SetMode, train=flags, at=some),
    one(weights.SetBuffer, replace=flags),
    one(weights.KeepInMemory, shards=[(), (0,), (1, 2), (0, 2, 4), (0, 1, 2, 3, 4, 5)]),
    one(hooks.RemoveHooks),
]


single = st.one_of(SINGLE).map(lambda statement: (statement,))
phrases: st.SearchStrategy[Sequence[Statement]] = st.one_of(
    single,
    single,
    single,
    st.tuples(recorded, backwards),
    st.tuples(zeros, recorded, backwards, st.just(gradients.Step())),
    st.tuples(recorded, backwards, st.just(gradients.Step()), zeros),
    st.tuples(recorded, recorded, backwards, backwards),
    st.tuples(recorded, forwards, backwards),
    st.tuples(recorded, recorded, st.just(passes.Backward((0, 1)))),
    st.tuples(recorded, writes, backwards),
    st.tuples(recorded, backwards, writes, st.just(gradients.Step())),
    st.tuples(recorded, backwards, st.just(gradients.KeepGradients()), zeros, recorded, backwards),
    st.tuples(hooked, recorded, backwards),
    st.tuples(swaps, recorded, backwards),
    st.tuples(swaps, zeros, recorded, backwards, st.just(gradients.Step())),
    st.tuples(writes, forwards),
    st.tuples(writes, recorded, backwards),
)

#: What a loop whose backward updates may hold.
WITH_UPDATES: tuple[type[Statement], ...] = (
    *(gradients.TrainStep, gradients.Look, gradients.Rate, gradients.NewOptimizer),
    *(weights.Write, weights.Average, weights.SaveState, weights.LoadState, weights.Checkpoint, weights.Freeze),
    *(weights.SetMode, weights.Copy, weights.SetBuffer, weights.KeepInMemory, weights.Swap),
)


def allowed(setup: Setup, statement: Statement, waiting: bool) -> bool:
    """Whether a statement is within what is promised for a setup."""
    if setup.updates == "backward" and not isinstance(statement, WITH_UPDATES):
        return isinstance(statement, passes.Forward) and statement.mode in ("no_grad", "eval", "inference")
    # The first run that writes weights is taken back, and repeated with its graph: these layers run twice there.
    twice = setup.checkpoint and setup.model in WRITERS
    if isinstance(statement, passes.Interrupt):
        return setup.trips and setup.microbatches == 1 and not (twice and statement.where == "forward")
    if twice and (
        isinstance(statement, around.Checkpointed) or (isinstance(statement, hooks.Hook) and "forward" in statement.on)
    ):
        return False
    if isinstance(statement, weights.KeepInMemory) and setup.planned:
        return False  # a plan decides it
    if isinstance(statement, weights.Write) and setup.planned and waiting:
        return False  # a shard that rests in memory is compared when backward reaches it, after others have gradients
    if isinstance(statement, hooks.Hook) and setup.microbatches > 1:
        # Layers see one micro-batch at a time.
        return statement.on in ("parameter", "accumulated", "output") or statement.at is None
    if waiting and writes_unseen(statement):
        return False
    return not isinstance(statement, weights.Reopen) or setup.home == "kept"


def writes_unseen(statement: Statement) -> bool:
    """Whether a statement writes weights in a way that no version tells, so that an earlier forward may not notice."""
    if isinstance(statement, hooks.Hook) and statement.on == "forward_pre" and statement.does == "step":
        return True
    if isinstance(statement, weights.Write):
        return statement.how in ("data_copy", "data_mul", "numpy")
    return isinstance(statement, weights.Average) and statement.do == "swap"


def waiting_after(waiting: int, statement: Statement) -> int:
    """How many outputs wait for a backward after a statement, if so many did before; never too few."""
    if isinstance(statement, passes.Forward) and statement.mode in ("train", "eval_grad", "save_on_cpu"):
        return waiting + 1
    if isinstance(statement, (weights.Copy, weights.Reopen)) and not getattr(statement, "aside", False):
        return 0
    used = isinstance(statement, passes.Backward) and not statement.create_graph and statement.inputs is None
    if used and not statement.retain and waiting:  # type: ignore[attr-defined]
        return waiting - len({k % waiting for k in statement.which})  # type: ignore[attr-defined]
    return waiting


def sensible(setup: Setup) -> bool:
    """Whether a setup is within what is promised."""
    if setup.microbatches > 1 and setup.model not in ROWWISE:
        return False
    if setup.model in BLOCKS and setup.home == "kept":  # such a home would not hold what is outside of the blocks
        return False
    return setup.updates != "backward" or setup.max_norm is None


@st.composite
def programs(draw: st.DrawFn, most: int = 7) -> Program:
    """Programs of up to ``most`` phrases."""
    setup = draw(setups.filter(sensible))
    found = draw(st.lists(phrases, min_size=1, max_size=most))
    if setup.home == "kept" and draw(st.booleans()):
        found.append((weights.Reopen(),))
    if setup.updates == "backward":
        found = [part for p in found for part in (p, (gradients.TrainStep(len(p)),))]
    statements: list[Statement] = []
    waiting = 0
    for statement in (statement for part in found for statement in part):
        if allowed(setup, statement, waiting > 0):
            statements.append(statement)
            waiting = waiting_after(waiting, statement)
    return Program(setup, tuple(statements))
