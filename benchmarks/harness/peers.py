"""Peers, the libraries that users have today, in environments of their own.

Some need versions that others cannot use: a peer is looked for in the environment whose interpreter the variable
``GRADSTREAM_PEER_PYTHON_<NAME>`` names, else in this one. Its case runs there, with ``benchmarks`` on
its path; it needs torch and psutil. A peer that is not found is a row of the table with the reason, never a failure.
"""

import os
import subprocess
import sys
from functools import cache

from benchmarks.harness.case import CannotRunError

#: Distribution of each peer -> what pip installs.
PEERS = {
    "torchgpipe": "torchgpipe==0.0.7",
    "fairscale": "fairscale==0.4.13",
    # Its module has the name of ours: installed beside it, one would hide the other.
    "gradcache": "--no-deps --target FOLDER gradcache==0.0.1 and set PYTHONPATH=FOLDER",
    "sentence-transformers": "sentence-transformers>=3",
    "transformers": "transformers>=5",
    "torchrec": "torchrec==1.8.0",
    "deepspeed": "deepspeed",
    "torchao": "torchao",
    "roundpipe": "-r benchmarks/requirements-gpu.txt",
}


def variable_of(name: str) -> str:
    """The environment variable that names the interpreter of a peer's environment."""
    return f"GRADSTREAM_PEER_PYTHON_{name.upper().replace('-', '_')}"


def find_peer(name: str) -> tuple[str, str]:
    """The interpreter that has a peer of :data:`PEERS`, and the peer's version, without importing it.

    Raises:
        CannotRunError: if it is not installed there; the message says what would help.
    """
    variable = variable_of(name)
    named = os.environ.get(variable, "")
    version = _version(named or sys.executable, name)
    if not version:
        place = f"the environment of {variable}" if named else "this environment"
        raise CannotRunError(f"no {name} in {place}; pip install {PEERS[name]}, or name another in {variable}")
    return named or sys.executable, version


@cache
def _version(python: str, distribution: str) -> str:
    """The version that is installed in an interpreter's environment; empty where there is none."""
    program = f"import importlib.metadata as m; print(m.version({distribution!r}))"
    try:
        return subprocess.run([python, "-c", program], capture_output=True, text=True, timeout=60).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""
