"""Parameter groups as ``torch.optim`` takes them, and what a class does with them."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = [
    "GroupChanges",
    "Members",
    "check_choices",
    "check_closures",
    "check_sparse",
    "copied_options",
    "groups_of",
    "members_of",
    "options_of",
    "placeholder",
    "same_option",
]


class Members(list[nn.Parameter]):
    """The parameters of a group. Reading one first calls ``finish``, which applies pending updates."""

    def __init__(self, parameters: Iterable[nn.Parameter], finish: Callable[[], None]) -> None:
        super().__init__(parameters)
        self._finish = weakref.WeakMethod(finish)

    def __iter__(self) -> Iterator[nn.Parameter]:
        if (finish := self._finish()) is not None:
            finish()
        return super().__iter__()

    def __getitem__(self, place: Any) -> Any:
        iter(self)  # finishes the updates
        return super().__getitem__(place)

    def __reduce__(self) -> Any:
        return list, ([*self],)


def members_of(group: Mapping[str, Any]) -> Iterator[nn.Parameter]:
    """The parameters of a group, without finishing updates."""
    members = group["params"]
    return list.__iter__(members) if isinstance(members, Members) else iter(members)


def groups_of(params: Any, ours: Collection[nn.Parameter]) -> list[dict[str, Any]]:
    """Groups as ``torch.optim`` takes them: parameters, ``(name, parameter)`` pairs, or dicts of these and options.

    The groups are the given dicts, as in ``torch``: a later write to such a dict changes the group.
    Raises TypeError for anything else; ValueError for none, or for a parameter that is not one of ``ours``.
    """
    if isinstance(params, (str, Tensor, Mapping)):
        raise TypeError(f"expected an iterable of parameters or groups, got {type(params).__name__} (params)")
    given = list(params)
    if not given:
        raise ValueError("expected at least one parameter or group, got an empty params")
    groups = []
    for group in given if isinstance(given[0], dict) else [{"params": given}]:
        if "params" not in group:
            raise ValueError(f"expected a group with the key 'params', got the keys {sorted(group)}")
        group["params"] = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
        groups.append(group)
    found = [each[1] if isinstance(each, tuple) else each for group in groups for each in group["params"]]
    if strangers := sum(isinstance(each, Tensor) and each not in ours for each in found):
        raise ValueError(
            f"expected parameters of the model, got {strangers} that are not among them; give those to an optimizer "
            f"of their own"
        )
    return groups


def placeholder(param: Any) -> Any:
    """A tensor without elements in place of a parameter, or of a ``(name, parameter)`` pair: to check options."""
    param = param[1] if isinstance(param, tuple) else param
    if not isinstance(param, Tensor):
        return param
    return torch.empty((0, *param.shape[1:]) if param.dim() else (), dtype=param.dtype)


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a group's hyperparameters: later changes by a scheduler do not reach it."""
    return copied_options({key: value for key, value in group.items() if key not in ("params", "param_names")})


def copied_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """A copy that shares no mutable object."""
    return {key: value if isinstance(value, _CONSTANT) else copy.deepcopy(value) for key, value in options.items()}


_CONSTANT = (int, float, str, type(None))


def same_option(first: Any, second: Any) -> bool:
    """Whether two hyperparameters are equal; False where they cannot be compared."""
    if type(first) is not type(second):
        return False
    if isinstance(first, Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    try:
        return bool(first == second) or bool(first != first and second != second)
    except (RuntimeError, TypeError, ValueError):
        return False


def check_choices(kind: Any, max_norm: Any, update_in_backward: bool, *, rounded: bool) -> None:
    """Raises TypeError or ValueError for arguments of ``OffloadOptimizer`` that cannot be used (together).

    ``rounded``: whether the model stores gradients in fewer bytes.
    """
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        got = repr(kind) if isinstance(kind, type) else f"an object of {type(kind).__name__}"
        raise TypeError(f"expected a class such as torch.optim.AdamW, got optimizer_class={got}")
    if kind is torch.optim.LBFGS or issubclass(kind, torch.optim.LBFGS):
        raise TypeError("LBFGS needs a closure and one vector of all parameters; take a class that updates each alone")
    if update_in_backward and rounded:
        raise ValueError(
            "update_in_backward=True and the model's gradient_dtype exclude each other: gradients are not stored, and "
            "the plan would decide which of them are rounded. Leave out gradient_dtype, which saves nothing then"
        )
    if max_norm is not None:
        if isinstance(max_norm, bool) or not isinstance(max_norm, (int, float)):
            raise TypeError(f"expected a number, got max_norm={max_norm!r}")
        if not max_norm > 0:
            raise ValueError(f"expected a positive norm, got max_norm={max_norm!r}")
        if update_in_backward:
            raise ValueError(
                f"max_norm={max_norm} and update_in_backward=True exclude each other: the global norm is known only "
                f"after the last gradient. Leave out update_in_backward: updates then run during the next forward"
            )


def check_closures(kind: type[Optimizer], arguments: Mapping[str, Any], group: Mapping[str, Any]) -> None:
    """Raises ValueError for a class whose ``step(closure)`` is more than the closure and then ``step()``.

    Tries it on one parameter in a group with the hyperparameters of ``group``.
    """
    parameter = nn.Parameter(torch.ones(1, 1))
    too_late = []

    def closure() -> Tensor:
        too_late.append(parameter._version > 0)
        return torch.zeros(())

    parameter.grad = torch.ones(1, 1)
    try:
        kind([{**options_of(group), "params": [parameter]}], **arguments).step(closure)  # type: ignore[arg-type]
        found = f"calls it {len(too_late)} times" if len(too_late) != 1 else "writes parameters before" * too_late[0]
    except Exception as error:
        found = f"raises {type(error).__name__} ({error})"
    if found:
        raise ValueError(
            f"expected a class whose step(closure) calls the closure once and then updates, got {kind.__name__}, which "
            f"{found}: shards are updated one after the other, behind the next forward. Call the closure yourself, "
            f"then step()"
        )


def check_sparse(kind: type[Optimizer], arguments: Mapping[str, Any], group: Mapping[str, Any]) -> None:
    """Raises what a class does for a sparse gradient, with the hyperparameters of ``group``: tries it."""
    parameter = nn.Parameter(torch.ones(2, 2))
    parameter.grad = torch.eye(2).to_sparse()
    kind([{**options_of(group), "params": [parameter]}], **arguments).step()


class GroupChanges:
    """Copies values that a class writes into its groups in a step (e.g. a count of steps) to the user's groups.

    Each param block has its own optimizer with a copy of its group. All param blocks of a group must write the same
    values: a class that writes others computes something from all parameters of the group together, which none has.
    """

    def __init__(self, kind: type[Optimizer]) -> None:
        self._kind = kind
        #: Whether a step is expected to write into groups. Classes of torch do not; others show it in a first step.
        self.expected = not kind.__module__.startswith("torch.optim.")
        #: By group: the hyperparameters that a param block of it wrote in this step, with their values.
        self.changes: dict[int, dict[str, Any]] = {}
        self._step: object = None
        self._error: str | None = None

    def publish(self, group: dict[str, Any], index: int, changes: dict[str, Any], step: object = None) -> None:
        """Writes the changes that a param block made in a group to the user's ``group``, which has this index.

        ``step`` is one object for all updates of a step; another object means another step.
        """
        if step is not None and step is not self._step:
            self._step, self.changes = step, {}
        known = self.changes.setdefault(index, changes)
        if known.keys() != changes.keys() or not all(same_option(value, known[key]) for key, value in changes.items()):
            self._error = (
                f"{self._kind.__name__} computes {sorted(known.keys() | changes.keys())} of group {index} from all "
                f"parameters of the group together, but shards are updated one after the other: take a class that "
                f"treats each parameter by itself. Parameters are wrong from this step on; load the last checkpoint"
            )
        self.expected |= bool(changes)
        group.update(copied_options(changes))

    def end_step(self) -> None:
        """Called when all groups are updated."""
        self.expected = any(self.changes.values())
        self.changes = {}

    def check(self) -> None:
        """Raises RuntimeError if the class couples parameters."""
        if self._error is not None:
            raise RuntimeError(self._error)
