"""Optional packages: a missing one is reported as the command that installs it."""

import importlib
from types import ModuleType


class MissingExtraError(ImportError):
    """A package of an extra is not installed."""


def require(name: str, extra: str = "bench") -> ModuleType:
    """The module ``name``, which the extra installs.

    Raises:
        MissingExtraError: if it cannot be imported; the message holds the command that installs it.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingExtraError(
            f"expected the package {name.partition('.')[0]!r} for this benchmark, got {error}; "
            f"run: python -m pip install 'gradstream[{extra}]'  (in a clone: python -m pip install -e '.[{extra}]')"
        ) from error
