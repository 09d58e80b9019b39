"""Thread settings are the same in another thread as where they were noted."""

import contextlib
import sys
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from pipe.recompute.thread_state import ThreadState, restores_thread_state


def in_thread(function: Any) -> Any:
    """What ``function`` returns in a fresh thread, whose settings are torch's defaults."""
    box = []
    thread = threading.Thread(target=lambda: box.append(function()))
    thread.start()
    thread.join()
    return box[0]


class Named(TorchFunctionMode):
    entered = 0

    def __enter__(self) -> Any:
        self.entered += 1
        return super().__enter__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.sin:
            return "seen"
        return func(*args, **(kwargs or {}))


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


SETTINGS = {
    "no_grad": (torch.no_grad, lambda: torch.is_grad_enabled() is False),
    "inference": (torch.inference_mode, torch.is_inference_mode_enabled),
    "autocast": (
        lambda: torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False),
        lambda: torch.is_autocast_enabled("cpu") and not torch.is_autocast_cache_enabled(),
    ),
    "default device": (lambda: torch.device("meta"), lambda: torch.empty(1).device.type == "meta"),
    "function mode": (Named, lambda: torch.sin(torch.ones(1)) == "seen"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_defect_pipe_4_a_setting_of_this_thread_is_carried_into_another(name: Any) -> None:
    make, reads = SETTINGS[name]
    assert not reads()
    with make():
        thread_state = ThreadState.capture({"cpu"})

    plain = ThreadState.capture({"cpu"})
    mode = name in ("default device", "function mode")  # of another thread: stays in force

    def elsewhere() -> Any:
        before = reads()
        with contextlib.suppress(ZeroDivisionError), thread_state.again():
            inside = reads()
            raise ZeroDivisionError
        after = reads()
        with make(), plain.again():
            return before, inside, after, reads()

    assert in_thread(elsewhere) == (False, True, False, mode)


def test_defect_pipe_4_hooks_and_modes_are_carried_into_another_thread_and_entered_once() -> None:
    packed, counting, named = [], Counting(), Named()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(1) or t, lambda t: t), counting, named:
        thread_state = ThreadState.capture()
        with thread_state.again():
            torch.ones(1)

    def elsewhere() -> None:
        with thread_state.again():
            torch.ones(1, requires_grad=True).exp()

    assert (counting.calls, named.entered) == (1, 1)
    in_thread(elsewhere)
    assert packed == [1]
    assert counting.calls > 1


WITH_DEFAULT = ContextVar("with default", default=0)
WITHOUT = ContextVar[int]("without")


@pytest.mark.parametrize("now", [None, 1, 2])
@pytest.mark.parametrize("then", [None, 1])
def test_context_variables_have_the_values_that_they_had(then: int | None, now: int | None) -> None:
    def put(value: int | None) -> Any:
        return [] if value is None else [(v, v.set(value)) for v in (WITH_DEFAULT, WITHOUT)]

    tokens = put(then)
    thread_state = ThreadState.capture()
    for variable, token in tokens:
        variable.reset(token)
    tokens = put(now)
    assert thread_state.run(lambda: (WITH_DEFAULT.get(), WITHOUT.get(None))) == (then or 0, then)
    assert (WITH_DEFAULT.get(None), WITHOUT.get(None)) == (now, now)
    for variable, token in tokens:
        variable.reset(token)


def test_hooks_of_torch_checkpoint_reach_a_thread_but_not_a_recomputation() -> None:
    noted = []

    def function(x: Any) -> Any:
        noted.append(ThreadState.capture())
        return x * 2

    torch.utils.checkpoint.checkpoint(function, torch.ones(1, requires_grad=True), use_reentrant=False)
    top = torch._C._autograd._top_saved_tensors_default_hooks
    with noted[0].again():
        assert top(False) is not None
    before = ThreadState.capture()
    noted[0].apply(recomputation=True)
    assert top(False) is None
    before.restore()


@pytest.mark.parametrize("function", [contextlib.ExitStack.__exit__, contextlib.ExitStack.enter_context])
@pytest.mark.parametrize("lines", range(12))
def test_all_contexts_of_a_stack_end_that_an_interrupt_stops_at_any_line(function: Any, lines: int) -> None:
    begun: list[int] = []
    ended: list[int] = []

    @contextlib.contextmanager
    def context(k: int) -> Iterator[None]:
        begun.append(k)
        try:
            yield
        finally:
            ended.append(k)

    @restores_thread_state
    def run() -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(context(0))
            stack.enter_context(context(1))

    left = lines

    def trace(frame: Any, event: str, arg: Any) -> Any:
        def line(frame: Any, event: str, arg: Any) -> Any:
            nonlocal left
            left -= event == "line"
            if left < 0:
                sys.settrace(before)
                raise KeyboardInterrupt
            return line

        return line if frame.f_code is function.__code__ else None

    before, held = sys.gettrace(), None
    sys.settrace(trace)
    try:
        run()
    except KeyboardInterrupt as error:
        held = error  # and with it the traceback, which holds what has not ended
    finally:
        sys.settrace(before)
    assert ended == begun[::-1], held
