"""Settings of a benchmark: a frozen dataclass whose fields are its command line options.

A field made by :func:`option` carries its help text and its bounds. All values that are out of bounds are named in one
error, before anything is measured.
"""

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast

S = TypeVar("S")


def option(
    default: Any,
    words: str,
    *,
    least: float = 1,
    multiple: int = 1,
    choices: Sequence[str] | None = None,
    kind: type | None = None,
) -> Any:
    """A field and its option, with a help text; False makes a flag.

    Numbers must be at ``least`` so much, and a ``multiple``; strings one of the ``choices``. ``kind`` is the type of
    the value, or of the values of a tuple, where the default does not tell.
    """
    first = default[0] if isinstance(default, tuple) and default else default
    metadata = {"help": words, "least": least, "multiple": multiple, "choices": choices, "kind": kind or type(first)}
    return dataclasses.field(default=default, metadata=metadata)


def add_options(parser: argparse.ArgumentParser, settings: type[Any]) -> None:
    """One option for each field: ``boundary_bytes`` becomes ``--boundary-bytes``."""
    for field in dataclasses.fields(settings):
        flag, kind = "--" + field.name.replace("_", "-"), field.metadata["kind"]
        more: dict[str, Any] = {"default": field.default, "help": field.metadata["help"]}
        if kind is bool:
            more["action"] = "store_true"
        else:
            more |= {"type": kind, "choices": field.metadata["choices"]}
            more["metavar"] = None if more["choices"] else "WORD" if kind is str else "N"
        if isinstance(field.default, tuple):
            more["nargs"] = "+"
        parser.add_argument(flag, **more)


def settings_of(settings: type[S], values: Mapping[str, Any]) -> S:
    """The settings with these values, and defaults for the others.

    Raises:
        ValueError: naming every value that is out of bounds, and what ``settings.wrong()`` adds, if it has that.
    """
    fields = dataclasses.fields(cast(Any, settings))
    given = {field.name: values[field.name] for field in fields if field.name in values}
    made = settings(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()})
    wrong = []
    for field in fields:
        value, least, multiple = getattr(made, field.name), field.metadata["least"], field.metadata["multiple"]
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, bool) or not isinstance(number, int | float):
                continue
            if not number >= least:
                wrong.append(f"expected at least {least:g}, got {field.name}={number}")
            elif multiple > 1 and number % multiple:
                wrong.append(f"expected a multiple of {multiple}, got {field.name}={number}")
    if not wrong and hasattr(made, "wrong"):
        wrong = made.wrong()
    if wrong:
        raise ValueError("; ".join(wrong))
    return made
