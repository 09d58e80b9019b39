"""A guard notices what changed in a module, and lets a recomputation read and write buffers without a trace."""

import contextlib

import pytest
import torch
from torch import nn

from pipe.guard import Guard, Watched


class Counter(nn.Module):
    """Reads a buffer, writes it, and leaves another alone."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("table", torch.arange(4.0))
        self.register_buffer("absent", None)
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self):
        self.calls += 1
        return self.calls.item()


def run(module, guard=None):
    guard = guard or Guard(Watched(module))
    value = module()
    return value, guard.seal()


def test_a_repeated_forward_reads_what_the_first_read_and_writes_nothing():
    module = Counter()
    first, guard = run(module)
    second, _ = run(module)
    assert (first, second) == (1.0, 2.0)
    calls = module.calls
    for _ in range(2):
        with guard.again():
            assert module() == 1.0
    assert module.calls is calls
    assert module.calls == 2


def test_only_written_buffers_are_kept():
    module = Counter()
    _, guard = run(module)
    assert [entry[1] for entry in guard._buffers] == ["calls"]


def test_a_buffer_replaced_by_the_forward_counts_as_written():
    class Replacing(Counter):
        def forward(self):
            self.calls = self.calls + 1
            return self.calls.item()

    module = Replacing()
    first, guard = run(module)
    with guard.again():
        assert module() == first
    assert module.calls == 1


def test_buffers_come_back_after_an_exception():
    module = Counter()
    _, guard = run(module)
    with contextlib.suppress(ValueError), guard.again():
        module()
        raise ValueError
    assert module.calls == 1


def test_all_changes_are_named_at_once():
    module = nn.Sequential(Counter(), nn.Dropout())
    guard = Guard(Watched(module)).seal()
    module.eval()
    with torch.no_grad():
        module[0].weight.add_(1)
    with pytest.raises(RuntimeError, match=r"parameter '0.weight'.*module 'itself'.*module '0'.*module '1'"):
        with guard.again():
            pass


def test_a_parameter_prepared_by_the_forward_itself_is_no_change():
    module = Counter()
    guard = Guard(Watched(module))
    with torch.no_grad():
        module.weight.mul_(2)
    guard.seal()
    with guard.again():
        pass
