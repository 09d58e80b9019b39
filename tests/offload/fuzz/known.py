"""What is known to fail and not mended yet: left out of the random draw, by name, and expected to fail in the corpus.

The aim is an empty list. An entry names claims of :mod:`tests.offload.fuzz.corpus`, whose programs are expected to
fail, strictly, so that an entry whose fault is mended has to go.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.offload.fuzz.around import AuxiliaryLoss, Regularised, TiedAround
from tests.offload.fuzz.hooks import Hook
from tests.offload.fuzz.passes import Backward, Forward, Grad
from tests.offload.fuzz.program import Setup, Statement
from tests.offload.fuzz.weights import Average, Copy, Swap, Write

__all__ = ["KNOWN", "Known", "excluded"]


@dataclass(frozen=True)
class Known:
    """A fault, the claims of the corpus that it breaks, and what of the draw would run into it."""

    name: str
    claims: tuple[str, ...]
    #: Given a setup, and None or one of its statements.
    runs_into: Callable[[Setup, Statement | None], bool]
    #: Whether that is so only while an output waits for its backward.
    waiting: bool = False
    #: If given, that is so only behind such a statement.
    behind: Callable[[Statement], bool] | None = None
    #: Whether it ends the interpreter, so that its claims cannot even be tried.
    crashes: bool = False


KNOWN: list[Known] = [
    Known(
        "what leaves a layer may lie in its slot",
        ("a_parameter_that_the_model_returns_stays_what_it_was",),
        lambda setup, s: setup.model == "parameter",
    ),
    Known(
        "writes through .data between forward and backward",
        ("other_numbers_between_forward_and_backward_are_seen_or_refused",),
        lambda setup, s: (
            (isinstance(s, Write) and s.how in ("data_copy", "data_mul", "numpy"))
            or (isinstance(s, Average) and s.do == "swap")
        ),
        waiting=True,
    ),
    Known(
        "generators of layers are not replayed",
        ("a_generator_of_a_layer_is_replayed_or_refused",),
        lambda setup, s: setup.model == "generator" and setup.checkpoint,
    ),
    Known(
        "a loss left in a layer has a graph of its own",
        ("a_loss_left_in_a_layer_is_refused_or_right",),
        lambda setup, s: setup.model == "auxiliary" and isinstance(s, AuxiliaryLoss),
    ),
    Known(
        "groups and states of optimizers that change",
        ("an_optimizer_may_count_in_its_groups", "a_state_may_grow_on_disk"),
        lambda setup, s: setup.optimizer in ("averaging", "changing") and setup.updates != "plain",
    ),
    Known(
        "hooks of layers run that backward(inputs=...) leaves out",
        ("hooks_of_layers_that_given_inputs_leave_out_do_not_run",),
        lambda setup, s: isinstance(s, Grad) or (isinstance(s, Backward) and s.inputs is not None),
        behind=lambda s: isinstance(s, Hook) and s.on in ("backward", "backward_pre"),
    ),
    Known(
        "a model whose layer holds a graph is not pickled",
        ("a_model_whose_layer_holds_a_graph_is_pickled_or_refused",),
        lambda setup, s: isinstance(s, Copy) and setup.model == "auxiliary",
    ),
    Known(
        "a model under the old weight_norm is not pickled",
        (),
        lambda setup, s: isinstance(s, Copy),
        behind=lambda s: isinstance(s, Swap) and s.how == "old_weight_norm",
    ),
    Known(
        "a buffer that was replaced in inference mode has no version",
        ("a_buffer_replaced_in_inference_mode_is_used_in_training",),
        lambda setup, s: isinstance(s, Forward) and s.mode == "inference" and setup.model == "counting",
    ),
    Known(
        "writes through .data of a hook that comes later are lost",
        ("a_hook_that_comes_later_writes_weights",),
        lambda setup, s: isinstance(s, Hook) and s.on == "forward_pre" and s.does == "step" and s.at is not None,
    ),
    Known(
        "bringing other data home counts as a write after it was used outside",
        ("other_data_is_used_outside_of_the_model_before_it_is_home",),
        lambda setup, s: isinstance(s, TiedAround) or (isinstance(s, Regularised) and s.first),
        behind=lambda s: isinstance(s, Write) and s.how in ("data", "vector", "swap"),
    ),
]


def excluded(
    setup: Setup,
    statement: Statement | None,
    *,
    waiting: bool = False,
    behind: Sequence[Statement] = (),
    but: str | None = None,
) -> bool:
    """Whether a setup, or a statement in it, runs into what is known to fail.

    Args:
        setup: of the program.
        statement: None for the setup alone.
        waiting: whether an output waits for its backward.
        behind: the statements before it.
        but: the name of a fault that may be run into.
    """
    return any(
        known.runs_into(setup, statement)
        for known in KNOWN
        if known.name != but
        and (waiting or not known.waiting)
        and (known.behind is None or any(known.behind(earlier) for earlier in behind))
    )
