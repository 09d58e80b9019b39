"""Packages that may be missing: those of extras, and peers, the libraries that users have today.

Some need versions that others cannot use: a peer is looked for in the environment whose interpreter the variable
``GRADSTREAM_PEER_PYTHON_<NAME>`` names, else in this one. Its case runs there, with ``benchmarks`` on
its path; it needs torch and psutil. A peer that is not found is a row of the table with the reason, never a failure.
"""

import importlib
import os
import subprocess
import sys
from functools import cache
from types import ModuleType
from typing import NamedTuple

ASK_SECONDS = 60.0


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


class Peer(NamedTuple):
    """One library: the module to import (if its import is to be checked), its distribution, how to install it."""

    module: str
    distribution: str
    install: str
    needs_accelerator: bool = False


PEERS = {
    "torchgpipe": Peer("torchgpipe", "torchgpipe", "torchgpipe==0.0.7"),
    "fairscale": Peer("fairscale", "fairscale", "fairscale==0.4.13"),
    "fairscale-offload": Peer("fairscale", "fairscale", "fairscale==0.4.13", needs_accelerator=True),
    # Its module has the name of ours: installed beside it, one would hide the other.
    "gradcache": Peer("", "gradcache", "--no-deps --target FOLDER gradcache==0.0.1 and set PYTHONPATH=FOLDER"),
    "sentence-transformers": Peer("sentence_transformers", "sentence-transformers", "sentence-transformers>=3"),
    "torchrec": Peer("torchrec", "torchrec", "torchrec==1.8.0"),
    "accelerate": Peer("accelerate", "accelerate", "accelerate"),
    "diffusers": Peer("diffusers", "diffusers", "diffusers accelerate"),
    "deepspeed": Peer("deepspeed", "deepspeed", "deepspeed"),
    "torchao": Peer("torchao", "torchao", "torchao", needs_accelerator=True),
}


class Found(NamedTuple):
    """The interpreter that has the peer, and the peer's version."""

    python: str
    version: str


def variable_of(name: str) -> str:
    """The environment variable that names the interpreter of a peer's environment."""
    return f"GRADSTREAM_PEER_PYTHON_{name.upper().replace('-', '_')}"


def find_peer(name: str) -> Found | str:
    """Finds a peer of :data:`PEERS` without importing it; else why it cannot run here, and what would help."""
    return _find(name, os.environ.get(variable_of(name), ""))


@cache
def _find(name: str, python: str) -> Found | str:
    peer = PEERS[name]
    version = _version_in(python or sys.executable, peer)
    if version is None:
        place = f"the environment of {variable_of(name)}" if python else "this environment"
        return (
            f"no {peer.module or peer.distribution} in {place}; pip install {peer.install}, or name another in "
            f"{variable_of(name)}"
        )
    if peer.needs_accelerator and not require("torch").cuda.is_available():
        return "needs an accelerator, and there is none"
    return Found(python or sys.executable, version)


def _version_in(python: str, peer: Peer) -> str | None:
    program = (
        "import importlib.metadata as m, importlib.util as u\n"
        f"print(m.version({peer.distribution!r}) if not {peer.module!r} or u.find_spec({peer.module!r}) else '')"
    )
    try:
        asked = subprocess.run([python, "-c", program], capture_output=True, text=True, timeout=ASK_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return asked.stdout.strip() or None
