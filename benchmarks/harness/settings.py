"""Settings of a benchmark: a frozen dataclass whose fields are its command line options, made by :func:`option`."""

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any


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
    kind = kind or type(default[0] if isinstance(default, tuple) else default)
    more: dict[str, Any] = {"help": words, "default": default}
    if kind is bool:
        more["action"] = "store_true"
    elif kind is str:
        more |= {"choices": choices, "metavar": None if choices else "WORD"}
    else:
        more |= {"type": _number(kind, least, multiple), "metavar": "N"}
    if isinstance(default, tuple):
        more["nargs"] = "+"
    return dataclasses.field(default=default, metadata=more)


def _number(kind: type, least: float, multiple: int) -> Callable[[str], Any]:
    def number(text: str) -> Any:
        value = kind(text)
        if not value >= least:
            raise argparse.ArgumentTypeError(f"expected at least {least:g}, got {text}")
        if value % multiple if multiple > 1 else False:
            raise argparse.ArgumentTypeError(f"expected a multiple of {multiple}, got {text}")
        return value

    return number


def add_options(parser: argparse.ArgumentParser, settings: type[Any]) -> None:
    """One option for each field: ``boundary_bytes`` becomes ``--boundary-bytes``."""
    for field in dataclasses.fields(settings):
        parser.add_argument("--" + field.name.replace("_", "-"), **field.metadata)


def settings_of(settings: type[Any], values: dict[str, Any]) -> Any:
    """The settings with these values, and defaults for the others; lists, as JSON has them, become tuples."""
    given = {field.name: values[field.name] for field in dataclasses.fields(settings) if field.name in values}
    return settings(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()})
