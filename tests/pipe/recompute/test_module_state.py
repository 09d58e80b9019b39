"""A guard notices what changed in a module, and lets a recomputation read and write buffers without a trace."""

import contextlib
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from pipe.recompute.module_state import ModuleState, WatchedModule
from pipe.recompute.rerun import trial
from tests.pipe.recompute.states import again


class Counter(nn.Module):
    """Reads a buffer, writes it, and leaves another alone."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("table", torch.arange(4.0))
        self.register_buffer("absent", None)
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self) -> Any:
        self.calls += 1
        return self.calls.item()


def run(module: Any, module_state: Any = None) -> Any:
    module_state = module_state or ModuleState(WatchedModule(module))
    value = module()
    return value, module_state.record_changes()


def test_a_repeated_forward_reads_what_the_first_read_and_writes_nothing() -> None:
    module = Counter()
    first, module_state = run(module)
    second, _ = run(module)
    assert (first, second) == (1.0, 2.0)
    calls = module.calls
    for _ in range(2):
        with again(module_state):
            assert module() == 1.0
    assert module.calls is calls
    assert module.calls == 2


def test_a_buffer_that_was_only_read_is_freed_with_the_last_forward_that_read_it() -> None:
    module = Counter()
    _, module_state = run(module)
    read = weakref.ref(module.table)
    module.table = torch.ones(4)
    with again(module_state):
        assert module.table is read()
        assert module() == 1.0
    run(module)
    assert read() is not None
    del module_state
    gc.collect()
    assert read() is None


def test_a_buffer_replaced_by_the_forward_counts_as_written() -> None:
    class Replacing(Counter):
        def forward(self) -> Any:
            self.calls = self.calls + 1
            return self.calls.item()

    module = Replacing()
    first, module_state = run(module)
    with again(module_state):
        assert module() == first
    assert module.calls == 1


def test_buffers_are_restored_after_an_exception() -> None:
    module = Counter()
    _, module_state = run(module)
    with contextlib.suppress(ValueError), again(module_state):
        module()
        raise ValueError
    assert module.calls == 1


def test_all_changes_are_named_at_once() -> None:
    module = nn.Sequential(Counter(), nn.Dropout())
    module_state = ModuleState(WatchedModule(module)).record_changes()
    module.eval()
    with torch.no_grad():
        module[0].weight.add_(1)
    with pytest.raises(RuntimeError, match=r"parameter '0.weight'.*module 'itself'.*module '0'.*module '1'"):
        module_state.check()


def test_a_parameter_prepared_by_the_forward_itself_is_no_change() -> None:
    module = Counter()
    module_state = ModuleState(WatchedModule(module))
    with torch.no_grad():
        module.weight.mul_(2)
    module_state.record_changes()
    module_state.check()
    with torch.no_grad():
        module.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified in place"):
        module_state.check()


LARGE = 1 << 15


class Clones(TorchDispatchMode):
    """Counts elements that are copied in large pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.clone.default and args[0].numel() >= LARGE:
            self.elements += args[0].numel()
        return func(*args, **(kwargs or {}))


def replace(module: Any) -> None:
    module.table = module.table + 1


def give_other_memory(module: Any) -> None:
    module.table.data = module.table + 1


def write_unannounced(module: Any) -> None:
    torch.ops.guard_tests.increment(module.table)


library = torch.library.Library("guard_tests", "DEF")
library.define("increment(Tensor x) -> Tensor")
library.impl("increment", lambda x: torch.from_numpy(x.numpy().__iadd__(1)).sum(), "CPU")

WRITES = {
    "in place": lambda module: module.table.add_(1),
    "through a view": lambda module: module.table.view(2, -1)[1].add_(1),
    "through data": lambda module: module.table.data.mul_(2).add_(1),
    "by index": lambda module: module.table.index_fill_(0, torch.tensor([3, 5]), 7.0),
    "by copying": lambda module: module.table.copy_(module.table.roll(1) + 1),
    "in a list": lambda module: torch._foreach_add_([module.table], 1),
    "as a result": lambda module: torch.add(module.table, 1, out=module.table),
    "replaced": replace,
    "other memory": give_other_memory,
    "unannounced": write_unannounced,
}


class Table(nn.Module):
    """Reads a large buffer, and writes it in some of its forwards."""

    def __init__(self, write: Any = None, calls: Any = (), **buffers: Any) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(LARGE))
        self.write, self.calls, self.count = write, calls, -1

    def forward(self, x: Any = None) -> Any:
        self.count += 1
        value = self.table.sum() + self.table[3]
        if self.count in self.calls:
            with torch.no_grad():
                self.write(self)
        return value.item()


def guarded(module: Any, watched: Any) -> Any:
    module_state = ModuleState(watched)
    with module_state.running():
        value = module()
    return value, module_state.record_changes()


# A library that writes without a word is found out by its first call, not by a later one.
CASES = [
    (how, calls) for how in WRITES for calls in ((0, 1, 2, 3), (0, 2), (1, 3)) if how != "unannounced" or 0 in calls
]


@pytest.mark.parametrize(("how", "calls"), CASES)
def test_each_repeated_forward_meets_the_large_buffer_that_it_met(how: Any, calls: Any) -> None:
    """Also the first that writes it, and where only some forwards do."""
    module, plain = Table(WRITES[how], calls), Table(WRITES[how], calls)
    watched, expected = WatchedModule(module), [plain() for _ in range(4)]
    runs = [guarded(module, watched) for _ in range(4)]
    assert [value for value, _ in runs] == expected
    after = module.table.clone()
    assert torch.equal(after, plain.table)
    for k, (value, module_state) in enumerate(runs):
        module.count = k - 1
        with again(module_state):
            assert module() == value
        assert torch.equal(module.table, after)


def test_a_large_buffer_that_is_only_read_is_never_copied() -> None:
    """A queue of 64 MiB, or quantised weights held as buffers, cost a copy of themselves with every chunk."""
    module = Table()
    for watched in (WatchedModule(module), WatchedModule(module)):
        with Clones() as clones:
            for _ in range(3):
                value, module_state = guarded(module, watched)
                with again(module_state):
                    assert module() == value
                with trial([watched], []):
                    module()
        assert clones.elements == 0


def test_a_large_buffer_that_forwards_write_is_copied_once_for_each() -> None:
    module = Table(WRITES["in place"], range(10))
    watched = WatchedModule(module)
    with Clones() as clones:
        for _ in range(3):
            guarded(module, watched)
    assert clones.elements == 3 * LARGE


@pytest.mark.parametrize("how", [how for how in WRITES if how != "unannounced"])
def test_a_trial_leaves_no_trace_in_a_large_buffer(how: Any) -> None:
    module = Table(WRITES[how], range(10))
    table = module.table
    with trial([WatchedModule(module)], []):
        module()
    assert module.table is table
    assert torch.equal(table, torch.zeros(LARGE))


def test_a_write_that_could_not_be_seen_is_refused_once() -> None:
    """As of compiled code, which writes below what sees operations; only afterwards its versions tell."""

    def write(module: Any) -> None:
        with _disable_current_modes():
            module.table.add_(1)

    module = Table(write, range(10))
    watched = WatchedModule(module)
    with pytest.raises(RuntimeError, match="run the step again"):
        guarded(module, watched)
    before = module.table.clone()
    value, module_state = guarded(module, watched)
    with again(module_state):
        assert torch.equal(module.table, before)
        assert module() == value


def test_a_compiled_module_s_large_buffers_are_copied_before_its_first_forward() -> None:
    module = Table()

    def forward(x: Any) -> Any:
        module.table.add_(1)
        return x + module.table.sum()

    module.forward = forward
    module.compile(backend="aot_eager")
    module_state = ModuleState(WatchedModule(module))
    with module_state.running():
        first = module(torch.zeros(()))
    module_state.record_changes()
    for _ in range(2):
        with again(module_state):
            assert module(torch.zeros(())) == first
    assert torch.equal(module.table, torch.ones(LARGE))


def test_a_buffer_of_inference_mode_counts_no_versions_and_is_kept() -> None:
    module = Counter()
    with torch.inference_mode():
        module.calls = module.calls + 1
    module_state = ModuleState(WatchedModule(module))
    with module_state.running(), torch.inference_mode():
        first = module()
    module_state.record_changes()
    with again(module_state):
        with torch.inference_mode():
            assert module() == first
    assert module.calls == 2
