"""Private names of torch are in one folder, and the releases that have all of them are known."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch
from torch import nn

ROOT = Path(__file__).parents[2]
MODULES = [path for package in ("pipe", "offload", "gradcache") for path in sorted((ROOT / package).rglob("*.py"))]

#: Releases of torch that all of this was run with. Another one may do as well: these tests tell.
KNOWN = ("2.8", "2.13")


_SUBCLASSES = ("_make_wrapper_subclass",)
#: Private attributes of torch's objects that the packages read, write or override, by type.
ATTRIBUTES: dict[type, tuple[str, ...]] = {
    torch.Tensor: ("_base", "_version", "_backward_hooks", "_post_accumulate_grad_hooks", "_indices", *_SUBCLASSES),
    nn.Module: (
        *("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks", "_compiled_call_impl"),
        *("_apply", "_load_from_state_dict", "_save_to_state_dict"),
    ),
}


def private_names(source: str) -> set[str]:
    """Names that begin with an underscore, imported from torch or reached through ``torch``."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.split(".")[0] == "torch"]
        elif isinstance(node, ast.Attribute):
            names = [text] if re.fullmatch(r"torch(\.\w+)+", text := ast.unparse(node)) else []
        else:
            continue
        found.update(name for name in names if re.search(r"\._(?!_)", name) and not name.startswith("torch.ops."))
    return found


def test_private_names_are_found() -> None:
    source = "import torch._dynamo\nfrom torch.nn import _x\ntorch._C.f()\ntorch.ops.aten._to_copy\ntorch.nn.f(self._x)"
    assert private_names(source) == {"torch._dynamo", "torch.nn._x", "torch._C", "torch._C.f"}


def test_only_one_folder_uses_private_names() -> None:
    used = {str(path.relative_to(ROOT)): private_names(path.read_text(encoding="utf-8")) for path in MODULES}
    used = {path: names for path, names in used.items() if names and not path.startswith("pipe/torch_private/")}
    assert used == {}


@pytest.mark.parametrize("kind", ATTRIBUTES)
def test_private_attributes_are_there(kind: type) -> None:
    instance = torch.ones(1) if kind is torch.Tensor else nn.Linear(1, 1)
    assert [name for name in ATTRIBUTES[kind] if not hasattr(instance, name)] == []


def test_private_attributes_of_tensors_and_modules_are_listed() -> None:
    """What is read of another object, is no attribute of the packages' own, and is one of torch's."""
    listed = {name for names in ATTRIBUTES.values() for name in names}
    of_torch = {name for x in (torch.ones(1), nn.Linear(1, 1)) for name in dir(x) if re.match(r"_[a-z]", name)}
    own, used = set(), set()
    for path in MODULES:
        if path.parent.name == "torch_private":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and re.match(r"_[a-z]", node.attr):
                mine = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
                (own if mine else used).add(node.attr)
    assert (used - own) & of_torch - listed == set()


def test_functions_with_a_fallback_use_the_real_thing() -> None:
    """Of a release that drops these the packages go on, but slower, or with a copy more."""
    assert hasattr(torch._C._autograd, "_get_current_graph_task_keep_graph")
    assert hasattr(torch._C, "_EnableTorchFunction")


def test_this_release_is_known() -> None:
    release = ".".join(torch.__version__.split(".")[:2])
    known = release in KNOWN
    if not known:
        pytest.skip(f"torch {release} is none of {KNOWN}; add it here if all other tests pass")
    assert known
