"""All private names of torch that the packages use, each behind a function or name that says what it means.

There is a module for each part of torch. These names have no public counterpart. A release that drops one breaks this
folder and no other; ``tests/pipe/test_torch_private.py`` lists the releases that were checked. :data:`ATTRIBUTES` lists
the private attributes of tensors and modules that the packages use directly, since many other libraries rely on them
too.
"""

from __future__ import annotations

from torch import Tensor, nn

__all__ = ["ATTRIBUTES"]

_SUBCLASSES = ("_make_wrapper_subclass",)
#: Private attributes of torch's objects that the packages read, write or override, by type.
ATTRIBUTES: dict[type, tuple[str, ...]] = {
    Tensor: ("_base", "_version", "_backward_hooks", "_post_accumulate_grad_hooks", "_indices", *_SUBCLASSES),
    nn.Module: (
        *("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks", "_compiled_call_impl"),
        *("_apply", "_load_from_state_dict", "_save_to_state_dict"),
    ),
}
