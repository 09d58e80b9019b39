"""What is known to fail and not mended yet: left out of the random draw, by name, and expected to fail in the corpus.

The aim is an empty list. An entry names claims of :mod:`tests.offload.fuzz.corpus`, whose programs are expected to fail,
strictly, so that an entry whose fault is mended has to go.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.offload.fuzz.gradients import KeepGradients, ZeroGrad
from tests.offload.fuzz.hooks import Hook
from tests.offload.fuzz.passes import (
    AuxiliaryLoss,
    Backward,
    ChunkedStep,
    Functional,
    Grad,
    Penalty,
    SetAside,
)
from tests.offload.fuzz.program import Setup, Statement
from tests.offload.fuzz.weights import Average, LoadState, Swap, Write

__all__ = ["CRASHES", "KNOWN", "Known", "excluded"]


@dataclass(frozen=True)
class Known:
    """A fault, the claims of the corpus that it breaks, and what of the draw would run into it."""

    name: str
    claims: tuple[str, ...]
    #: Given a setup, and None or one of its statements.
    runs_into: Callable[[Setup, Statement | None], bool]
    #: Whether that is so only while an output waits for its backward.
    waiting: bool = False


def _double_backward(setup: Setup, s: Statement | None) -> bool:
    if isinstance(s, Functional):
        return s.kind in ("hvp", "hessian", "jvp", "func_jvp")
    return isinstance(s, Penalty) or (isinstance(s, Backward) and s.create_graph)


KNOWN: list[Known] = [
    Known(
        "what leaves a layer may lie in its slot",
        (
            "a_table_that_is_passed_on_is_read_by_the_last_layer",
            "a_table_that_is_passed_on_takes_its_gradients",
            "an_expanded_parameter_is_passed_on",
            "an_expanded_parameter_is_passed_on_recomputed",
            "a_parameter_that_the_model_returns_stays_what_it_was",
        ),
        lambda setup, s: setup.model in ("table", "queries", "parameter"),
    ),
    Known(
        "double backward is dropped",
        (
            "a_penalty_on_the_gradient_of_the_input_is_refused_or_right",
            "a_penalty_alone_on_the_gradient_of_the_input_is_refused_or_right",
            "a_penalty_on_the_gradients_of_parameters_is_refused_or_right",
            "a_penalty_on_grad_after_create_graph_is_refused_or_right",
            "a_hessian_vector_product_is_refused_or_right",
            "a_hessian_is_refused_or_right",
            "forward_mode_is_refused_or_right",
        ),
        _double_backward,
    ),
    Known(
        "gradients on disk are overwritten",
        (
            "gradients_that_are_kept_outlive_a_backward_on_disk",
            "gradients_set_aside_are_added_on_disk",
            "chunked_steps_accumulate_on_disk",
            "chunked_steps_begin_from_zeros_on_disk",
        ),
        lambda setup, s: setup.home != "cpu" and isinstance(s, (KeepGradients, SetAside, ChunkedStep)),
    ),
    Known(
        "writes through .data inside a visit are lost",
        (
            "a_layer_initialises_itself_from_its_first_batch",
            "a_layer_initialises_itself_from_its_first_batch_recomputed",
            "a_layer_gives_its_weight_other_data",
            "a_step_in_a_hook_moves_the_weights",
            "a_step_in_a_hook_moves_the_weights_on_disk",
        ),
        lambda setup, s: (
            setup.model in ("actnorm", "renormed") or (isinstance(s, Hook) and s.on == "accumulated" and s.does == "step")
        ),
    ),
    Known(
        "structure that changes after wrapping is not noticed",
        (
            "a_state_loaded_by_assignment_trains",
            "a_replaced_layer_is_followed_or_refused",
            "adapters_are_followed_or_refused",
            "spectral_norm_is_followed_or_refused",
        ),
        lambda setup, s: isinstance(s, Swap) or (isinstance(s, LoadState) and s.assign),
    ),
    Known(
        "p.data = v is lost",
        (
            "other_data_of_a_parameter_is_kept_on_disk",
            "a_vector_of_parameters_is_kept_on_disk",
            "other_data_between_backward_and_step_is_stepped",
        ),
        lambda setup, s: (
            isinstance(s, Write)
            and s.how in ("data", "vector", "set", "swap")
            and (setup.home == "kept" or setup.updates != "plain")
        ),
    ),
    Known(
        "writes through .data between forward and backward",
        (
            "other_data_between_forward_and_backward_is_kept",
            "other_numbers_between_forward_and_backward_are_seen_or_refused",
        ),
        lambda setup, s: (
            (isinstance(s, Write) and s.how in ("data", "data_copy", "data_mul", "numpy", "vector", "swap"))
            or (isinstance(s, Average) and s.do == "swap")
        ),
        waiting=True,
    ),
    Known(
        "the forward of a subclass of Sequential is ignored",
        ("an_own_forward_of_a_sequential_is_run_or_refused",),
        lambda setup, s: setup.model == "residual",
    ),
    Known(
        "backward(inputs=...) and autograd.grad find nothing",
        (
            "backward_of_given_inputs_reaches_parameters",
            "backward_of_the_last_parameter_reaches_it_alone",
            "gradients_of_parameters_are_returned",
        ),
        lambda setup, s: (isinstance(s, Backward) and s.inputs is not None) or (isinstance(s, Grad) and s.of != "x"),
    ),
    Known(
        "a route is recomputed from values that were left out",
        ("a_route_read_on_the_host_is_taken_again",),
        lambda setup, s: setup.model in ("routed", "branching") and setup.checkpoint,
    ),
    Known(
        "a view that a function keeps is overwritten",
        ("a_view_kept_by_a_function_is_there_in_backward",),
        lambda setup, s: setup.model in ("custom", "closure") and not setup.checkpoint,
    ),
    Known(
        "a functional call gives its gradients to the model",
        ("a_functional_call_is_refused_or_right",),
        lambda setup, s: isinstance(s, Functional) and s.kind == "call",
    ),
    Known(
        "hooks of parameters run for each shard and micro-batch",
        ("a_hook_of_a_tied_parameter_sees_the_sum", "a_hook_of_a_parameter_sees_all_microbatches"),
        lambda setup, s: (
            isinstance(s, Hook)
            and s.on in ("parameter", "accumulated")
            and (setup.model == "tied" or setup.microbatches > 1)
        ),
    ),
    Known(
        "one tensor twice in a boundary becomes two",
        ("one_tensor_twice_in_a_boundary_stays_one",),
        lambda setup, s: setup.model == "double",
    ),
    Known(
        "state in attributes is not replayed",
        ("state_in_an_attribute_is_recomputed_or_refused", "a_generator_of_a_layer_is_replayed_or_refused"),
        lambda setup, s: setup.model in ("recurrent", "generator") and setup.checkpoint,
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
        "two parameters exchange their data",
        ("two_parameters_exchange_their_data",),
        lambda setup, s: isinstance(s, Write) and s.how == "swap",
    ),
    Known(
        "gradients on disk cannot be detached in place",
        ("a_loop_may_detach_and_zero_gradients_on_disk",),
        lambda setup, s: setup.home != "cpu" and isinstance(s, ZeroGrad) and s.by == "loop" and not s.set_to_none,
    ),
    Known(
        "torch.func.grad ends the interpreter",
        ("torch_func_grad_is_refused_or_right",),
        lambda setup, s: isinstance(s, Functional) and s.kind == "func_grad",
    ),
]

#: Claims whose failure would end the interpreter, so that they cannot even be tried.
CRASHES = frozenset({"torch_func_grad_is_refused_or_right"})


def excluded(setup: Setup, statement: Statement | None, *, waiting: bool = False, but: str | None = None) -> bool:
    """Whether a setup, or a statement in it, runs into what is known to fail.

    Args:
        setup: of the program.
        statement: None for the setup alone.
        waiting: whether an output waits for its backward.
        but: the name of a fault that may be run into.
    """
    return any(
        known.runs_into(setup, statement) for known in KNOWN if known.name != but and (waiting or not known.waiting)
    )
