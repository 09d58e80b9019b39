"""Draws programs: setups, and statements one by one or in the phrases that loops are made of."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from tests.offload.fuzz import around, gradients, hooks, passes, weights
from tests.offload.fuzz.blocks import BLOCKS
from tests.offload.fuzz.models import MODELS, ROWWISE, WRITERS
from tests.offload.fuzz.program import Program, Setup, Statement
from tests.offload.fuzz.world import OPTIMIZERS

__all__ = ["programs"]

seeds = st.integers(0, 5)
places = st.sampled_from([0, 1, 2, 3, 5])
some = st.sampled_from([None, 0, 1, 2, 3, 5])
flags = st.booleans()

#: Models that stand for a mechanism that no other model needs.
TRICKY = ["table", "queries", "custom", "closure", "actnorm", "renormed", "routed", "double", "tied"]

setups = st.builds(
    Setup,
    model=st.sampled_from(sorted(MODELS)) | st.sampled_from(TRICKY) | st.sampled_from(sorted(BLOCKS)),
    home=st.sampled_from(["cpu", "disk", "disk", "kept"]),
    checkpoint=flags,
    slices=st.sampled_from([1, 2, 3, 4, 5, 6]),
    slots=st.sampled_from([2, 2, 3, 5]),
    microbatches=st.sampled_from([1, 1, 1, 2]),
    boundary=st.sampled_from([None, None, 0, 300]),
    graphs=st.sampled_from([None, None, 1500, 1 << 20]),
    planned=st.sampled_from([None, None, (0, 1 << 20), (3000, 0), (1 << 20, 1 << 20)]),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)) | st.sampled_from(["sgd", "adamw"]),
    updates=st.sampled_from(["plain", "plain", "offload", "offload", "backward"]),
    max_norm=st.sampled_from([None, None, 0.5]),
    late=flags,
    trips=st.sampled_from([False, False, True]),
    looks=st.sampled_from([True, True, True, False]),
)

forwards = st.builds(
    passes.Forward,
    seed=seeds,
    mode=st.sampled_from(["train", "train", "train", "no_grad", "eval", "eval_grad", "inference", "save_on_cpu"]),
    rows=st.sampled_from([4, 4, 6, 1]),
    x_grad=flags,
)
recorded = st.builds(passes.Forward, seed=seeds, x_grad=flags)
outputs = st.sampled_from([(0,), (0,), (1,), (0, 1), (2,)])
losses = st.sampled_from(["square", "sum", "first", "last"])
backwards = st.builds(
    passes.Backward,
    which=outputs,
    loss=losses,
    retain=st.sampled_from([False, False, True]),
    create_graph=st.sampled_from([False] * 7 + [True]),
    inputs=st.sampled_from([None, None, None, None, "all", "first", "last", "x"]),
)
zeros = st.builds(gradients.ZeroGrad, by=st.sampled_from(["model", "optimizer", "loop"]), set_to_none=flags)
writes = st.builds(
    weights.Write,
    how=st.sampled_from(
        ["data", "data", "data_copy", "data_mul", "in_place", "vector", "swap", "numpy", "state_dict", "set"]
    ),
    at=some,
    seed=seeds,
)
hooked = st.builds(
    hooks.Hook,
    on=st.sampled_from(["parameter", "accumulated", "forward", "forward_pre", "backward", "backward_pre", "output"]),
    does=st.sampled_from(["log", "scale", "step"]),
    at=some,
)
swaps = st.builds(
    weights.Swap,
    how=st.sampled_from(
        [
            *("module", "parameter", "weight_norm", "old_weight_norm", "spectral_norm", "lora", "tie", "no_bias"),
            *("forward", "remove"),
        ]
    ),
    at=places,
    seed=seeds,
)

#: Every kind of statement, each as likely as another.
SINGLE: list[st.SearchStrategy[Statement]] = [
    forwards,
    backwards,
    zeros,
    writes,
    hooked,
    swaps,
    st.builds(passes.Grad, which=outputs, of=st.sampled_from(["all", "first", "last", "x"]), retain=flags, loss=losses),
    st.builds(passes.Penalty, of=st.sampled_from(["x", "all", ".grad"]), seed=seeds, with_loss=flags),
    st.builds(
        passes.Functional,
        kind=st.sampled_from(["call", "jvp", "vjp", "hvp", "func_jvp", "hessian", "func_grad"]),
        seed=seeds,
    ),
    st.builds(around.AuxiliaryLoss, seed=seeds),
    st.builds(
        passes.Interrupt,
        where=st.sampled_from(["forward", "backward", "recomputation"]),
        after=st.integers(0, 5),
        seed=seeds,
    ),
    st.builds(around.ChunkedStep, seed=seeds, bare=flags, rows=st.sampled_from([4, 6])),
    st.builds(around.SetAside, seed=seeds, into=st.sampled_from(["old", "new", "none"])),
    st.builds(around.Regularised, seed=seeds, first=flags),
    st.builds(around.TiedAround, seed=seeds, at=places),
    st.builds(around.Checkpointed, seed=seeds, reentrant=flags),
    st.just(passes.MutateInput()),
    st.just(passes.MutateOutput()),
    st.just(gradients.KeepGradients()),
    st.builds(gradients.UseKept, how=st.sampled_from(["assign", "kept", "copy", "fresh"])),
    st.builds(gradients.ScaleGradients, how=st.sampled_from(["in_place", "data", "assign"])),
    st.builds(gradients.Clip, by=st.sampled_from(["norm", "value"])),
    st.just(gradients.Step()),
    st.builds(gradients.TrainStep, seed=seeds, accumulate=st.integers(1, 2), set_to_none=flags),
    st.just(gradients.NewOptimizer()),
    st.builds(gradients.Rate, lr=st.sampled_from([0.02, 0.1])),
    st.just(gradients.Look()),
    st.builds(weights.Average, do=st.sampled_from(["update", "update", "swap"])),
    st.builds(weights.SaveState, how=st.sampled_from(["clone", "reference", "file"])),
    st.builds(weights.LoadState, assign=flags, optimizer=flags),
    st.builds(weights.Checkpoint, load=flags),
    st.builds(weights.Copy, how=st.sampled_from(["deepcopy", "pickle"]), aside=flags),
    st.just(weights.Reopen()),
    st.builds(weights.Freeze, at=some, on=flags),
    st.builds(weights.SetMode, train=flags, at=some),
    st.builds(weights.SetBuffer, replace=flags),
    st.builds(weights.KeepInMemory, shards=st.sampled_from([(), (0,), (1, 2), (0, 2, 4), (0, 1, 2, 3, 4, 5)])),
    st.just(hooks.RemoveHooks()),
]


def phrase(*parts: st.SearchStrategy[Statement]) -> st.SearchStrategy[Sequence[Statement]]:
    return st.tuples(*parts)


single = st.one_of(SINGLE).map(lambda statement: (statement,))
phrases: st.SearchStrategy[Sequence[Statement]] = st.one_of(
    single,
    single,
    single,
    phrase(recorded, backwards),
    phrase(zeros, recorded, backwards, st.just(gradients.Step())),
    phrase(recorded, backwards, st.just(gradients.Step()), zeros),
    phrase(recorded, recorded, backwards, backwards),
    phrase(recorded, forwards, backwards),
    phrase(recorded, recorded, st.just(passes.Backward((0, 1)))),
    phrase(recorded, writes, backwards),
    phrase(recorded, backwards, writes, st.just(gradients.Step())),
    phrase(recorded, backwards, st.just(gradients.KeepGradients()), zeros, recorded, backwards),
    phrase(hooked, recorded, backwards),
    phrase(swaps, recorded, backwards),
    phrase(swaps, zeros, recorded, backwards, st.just(gradients.Step())),
    phrase(writes, forwards),
    phrase(writes, recorded, backwards),
)

#: What a loop whose backward updates may hold.
WITH_UPDATES: tuple[type[Statement], ...] = (
    gradients.TrainStep,
    weights.Write,
    weights.Average,
    weights.SaveState,
    weights.LoadState,
    weights.Checkpoint,
    gradients.Look,
    weights.Freeze,
    weights.SetMode,
    gradients.Rate,
    weights.Copy,
    weights.SetBuffer,
    weights.KeepInMemory,
    gradients.NewOptimizer,
    weights.Swap,
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
    if setup.home == "kept" and draw(flags):
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
