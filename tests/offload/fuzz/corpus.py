"""Programs that failed once, each under the claim that it tests."""

from __future__ import annotations

from tests.offload.fuzz.around import AuxiliaryLoss, Checkpointed, Regularised, SetAside, TiedAround
from tests.offload.fuzz.gradients import NewOptimizer, Step, TrainStep, ZeroGrad
from tests.offload.fuzz.hooks import Hook, RemoveHooks
from tests.offload.fuzz.passes import Backward, Forward, Functional, Interrupt, Penalty
from tests.offload.fuzz.program import Program, Setup, Statement
from tests.offload.fuzz.weights import Checkpoint, Copy, Freeze, LoadState, Reopen, SaveState, SetBuffer, Swap, Write

TRAIN: tuple[Statement, ...] = (Forward(), Backward())


def program(*statements: Statement, **setup: object) -> Program:
    return Program(Setup(**setup), statements)  # type: ignore[arg-type]


#: Claim -> the program that tests it.
EQUAL: dict[str, Program] = {
    # What leaves a layer does not live in its slot.
    # Autograd's contracts.
    "a_penalty_on_the_gradient_of_the_input_is_refused_or_right": program(Penalty()),
    "a_penalty_on_the_gradients_of_parameters_is_refused_or_right": program(Penalty(of="all")),
    "a_penalty_on_grad_after_create_graph_is_refused_or_right": program(Penalty(of=".grad"), checkpoint=True),
    "a_hessian_is_refused_or_right": program(Functional("hessian"), checkpoint=True),
    "code_before_blocks_that_given_inputs_leave_out_does_not_run_backward": program(
        Forward(x_grad=True), Write("set", 0), Backward(inputs="last"), model="blocks_normed"
    ),
    # What was handed out is never written again.
    "gradients_set_aside_are_added_on_disk": program(*TRAIN, SetAside(seed=1), home="disk"),
    # What layers and hooks write.
    "a_step_in_a_hook_moves_the_weights_on_disk": program(
        Hook("accumulated", "step", None), *TRAIN, Forward(), home="disk", checkpoint=True
    ),
    "a_hook_that_comes_later_writes_weights": program(
        Forward(), Forward(), Forward(), Hook("forward_pre", "step"), Forward(), Forward()
    ),
    # p.data = v between calls.
    "other_data_of_a_parameter_is_kept_on_disk": program(Write("data", 0), Reopen(), home="kept"),
    "shards_that_rested_in_memory_are_kept_on_disk": program(
        *[TrainStep()] * 4, Reopen(), TrainStep(), home="kept", checkpoint=True, planned=(1 << 20, 1 << 20)
    ),
    "other_data_between_backward_and_step_is_stepped": program(*TRAIN, Write("data"), Step(), updates="offload"),
    "other_data_is_used_outside_of_the_model_before_it_is_home": program(Write("data"), Regularised(first=True)),
    "frozen_layers_that_no_backward_reaches_may_be_written": program(
        Freeze(0), Freeze(1), Forward(), Write("data_mul", 0), Backward(), checkpoint=True
    ),
    "a_buffer_that_is_replaced_before_the_backward_is_the_old_one_in_the_recomputation": program(
        *(Forward(mode="eval_grad"), SetBuffer(replace=True), Backward(), *TRAIN), model="batchnorm", checkpoint=True
    ),
    "a_parameter_that_is_thawed_before_the_backward_gets_no_gradient": program(
        Freeze(2), Forward(), Freeze(2, on=True), Backward(), *TRAIN, checkpoint=True
    ),
    # Recomputation.
    "a_loss_left_in_a_layer_is_refused_or_right": program(AuxiliaryLoss(), model="auxiliary", checkpoint=True),
    "a_loss_left_in_the_first_shard_whose_graph_is_kept_is_refused_or_right": program(
        AuxiliaryLoss(), model="auxiliary", slices=1
    ),
    # Hooks of parameters.
    "a_hook_of_a_parameter_sees_all_microbatches": program(Hook("parameter"), *TRAIN, microbatches=2),
    "a_hook_of_a_layer_whose_result_also_goes_around_blocks_sees_the_whole_gradient_or_is_refused": program(
        Hook("backward"), *TRAIN, model="blocks_around"
    ),
    "a_hook_of_a_block_of_which_one_output_goes_around_the_next_sees_all_gradients_or_is_refused": program(
        Hook("backward_pre", at=2), *TRAIN, model="blocks_through"
    ),
    **{
        f"hooks_of_layers_that_inputs_{inputs}_leave_out_do_not_run{'_with_recomputation' * recompute}": program(
            *(Hook(on, at=at) for on in ("backward_pre", "backward") for at in (0, 2, 3, 5)),
            *(Forward(x_grad=True), Hook("output"), Backward(inputs=inputs)),
            checkpoint=recompute,
        )
        for inputs in ("all", "first", "last", "x")
        for recompute in (False, True)
    },
    "hooks_of_blocks_that_given_inputs_leave_out_do_not_run": program(
        Hook("backward", at=3), Forward(), Backward(inputs="last"), model="blocks_around", slices=3
    ),
    "hooks_in_a_block_of_which_given_inputs_need_one_argument_do_not_run_or_are_refused": program(
        Hook("backward", at=3), Forward(), Backward(inputs="last"), model="blocks_sided"
    ),
    # Inference.
    "a_hook_that_comes_after_the_forward_is_not_in_its_recomputation": program(
        Forward(), Hook("forward", "scale"), Backward(), checkpoint=True
    ),
    "a_hook_that_is_removed_after_the_forward_is_in_its_recomputation": program(
        Hook("forward", "scale"), Forward(), RemoveHooks(), Backward(), checkpoint=True
    ),
    "another_forward_of_a_layer_is_not_in_a_recomputation": program(
        Forward(), Swap("forward"), Backward(), checkpoint=True
    ),
    "a_model_whose_layer_holds_a_graph_is_pickled_or_refused": program(
        Forward(), Copy("pickle", aside=True), model="auxiliary"
    ),
    "a_parameter_around_blocks_that_gets_other_memory_before_the_backward_gets_its_gradient": program(
        Forward(), Write("set", at=0), Backward(), model="blocks"
    ),
    "a_frozen_weight_to_which_a_layer_assigns_data_is_stored": program(
        Freeze(at=2), Forward(rows=6), Forward(), model="renormed", checkpoint=True
    ),
    "a_gradient_that_rests_in_memory_is_no_view": program(
        Penalty(with_loss=False),
        ZeroGrad("loop", set_to_none=False),
        model="queries",
        home="disk",
        checkpoint=True,
        planned=(0, 1 << 20),
        updates="offload",
    ),
    "a_model_with_blocks_runs_inside_a_reentrant_checkpoint": program(Checkpointed(reentrant=True), model="blocks"),
    # Optimizers.
    "a_weight_that_is_also_used_around_the_model_is_clipped_by_its_whole_gradient": program(
        TiedAround(at=1), Step(), updates="offload", max_norm=0.5
    ),
    "an_update_in_backward_is_no_write_between_forward_and_backward": program(
        *[TrainStep()] * 4, model="custom", updates="backward", optimizer="adamw"
    ),
    "an_optimizer_counts_a_step_once_if_its_backward_updates_all_but_the_parameters_outside_of_blocks": program(
        TrainStep(), TrainStep(), model="blocks_glued", optimizer="averaging", updates="backward"
    ),
    "states_on_disk_of_several_types_are_saved_by_torch": program(
        TrainStep(), TrainStep(), SaveState("file"), optimizer="changing", updates="offload", home="disk"
    ),
    "a_state_dict_of_several_types_is_saved_by_torch": program(SaveState("file"), model="mixed", slices=2),
    **{
        f"sparse_gradients_update_and_sparse_states_are_checkpointed_with_{optimizer}": program(
            *(TrainStep(), TrainStep(seed=1), Checkpoint(), TrainStep(seed=2), Checkpoint(load=True), TrainStep()),
            model="sparse",
            optimizer=optimizer,
            updates="offload",
            home="disk",
            slices=slices,
            checkpoint=True,
        )
        for optimizer, slices in (("sgd", 1), ("nesterov", 2), ("adagrad", 3))
    },
    # Interrupts.
    "interrupts_leave_the_model_usable": program(
        *(Interrupt(), *TRAIN, Interrupt("backward"), *TRAIN, Interrupt("recomputation"), *TRAIN),
        **{"model": "dropout", "home": "disk", "checkpoint": True, "trips": True},
    ),
    "weights_that_were_written_before_an_interrupt_stay_written": program(
        Interrupt(after=2), *TRAIN, model="actnorm", trips=True, slices=1, home="disk"
    ),
}

#: Programs that are refused.
REFUSED: dict[str, Program] = {
    "a_model_with_blocks_is_refused_inside_other_checkpoints": program(Checkpointed(), model="blocks"),
    "forward_mode_is_refused_or_right": program(Functional("jvp")),
    "torch_func_grad_is_refused_or_right": program(Functional("func_grad")),
    "torch_func_grad_of_a_model_with_blocks_is_refused_or_right": program(Functional("func_grad"), model="blocks"),
    "a_functional_call_is_refused_or_right": program(Functional("call"), checkpoint=True),
    "a_hook_writes_weights_of_a_forward_that_waits_for_its_recomputation": program(
        Forward(), Hook("forward_pre", "step"), Forward(), Backward((1,)), model="routed", checkpoint=True
    ),
    "a_state_that_is_kept_by_reference_keeps_its_numbers": program(
        SaveState("reference"), Write("data"), Forward(), LoadState()
    ),
    "a_state_loaded_by_assignment_trains": program(
        LoadState(assign=True), NewOptimizer(), TrainStep(), updates="offload"
    ),
    "other_data_is_noticed_although_another_forward_has_run": program(
        Forward(), Write("data"), Forward(mode="no_grad"), Backward()
    ),
    **{
        f"a_layer_that_is_changed_by_{how}_is_followed_or_refused": program(Swap(how), *TRAIN, NewOptimizer(), Step())
        for how in ("module", "parameter", "lora", "weight_norm", "spectral_norm")
    },
    "a_kept_home_is_not_closed_without_a_replaced_layer": program(Swap("module"), Reopen(), home="kept"),
    "an_own_forward_of_a_sequential_is_run_or_refused": program(*TRAIN, model="residual"),
    "a_backward_that_is_refused_leaves_no_gradient_around_blocks": program(
        Forward(), Write("data"), Backward(), model="blocks", slices=1
    ),
    "a_backward_with_a_graph_that_is_refused_leaves_no_gradient_around_blocks": program(
        Forward(), Backward(create_graph=True), model="blocks_through", home="disk"
    ),
}
