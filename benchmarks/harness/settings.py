"""Settings of a benchmark: a frozen dataclass whose fields are its command line options, made by :func:`option`."""

import argparse
import dataclasses
from typing import Any


def option(
    default: Any, words: str, *, least: float = 1, multiple: int = 1, choices: Any = None, kind: Any = None
) -> Any:
    """A field and its option, with a help text; False makes a flag, a tuple takes several values.

    Numbers must be at ``least`` so much, and a ``multiple``; strings one of the ``choices``. ``kind`` is the type of
    the value where the default does not tell.
    """
    several = isinstance(default, tuple)
    kind = kind or type(default[0] if several else default)

    def value(text: str) -> Any:
        number = kind(text)
        if not number >= least or (multiple > 1 and number % multiple):
            ask = f"a multiple of {multiple}" if number >= least else f"at least {least:g}"
            raise argparse.ArgumentTypeError(f"expected {ask}, got {text}")
        return number

    how: dict[str, Any] = {"type": str if kind is str else value, "choices": choices, "nargs": "+" if several else None}
    how = {"action": "store_true"} if kind is bool else {**how, "metavar": None if choices else kind.__name__.upper()}
    return dataclasses.field(default=default, metadata={"help": words, "default": default, **how})


def add_options(parser: argparse.ArgumentParser, settings: type[Any]) -> None:
    """One option for each field: ``boundary_bytes`` becomes ``--boundary-bytes``."""
    for field in dataclasses.fields(settings):
        parser.add_argument("--" + field.name.replace("_", "-"), **field.metadata)


def settings_of(settings: type[Any], values: dict[str, Any]) -> Any:
    """The settings with these values, and defaults for the others; lists, as JSON has them, become tuples."""
    given = {field.name: values[field.name] for field in dataclasses.fields(settings) if field.name in values}
    return settings(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()})
