#!/bin/sh
# Runs the tests that need torchrec in an environment of their own.
#
#   tests/pipe/train/with_torchrec.sh [DIRECTORY]
#
# DIRECTORY keeps the environment (default: .venv-torchrec).
#
# torchrec asks for fbgemm-gpu, which is built for CUDA alone; fbgemm-gpu-cpu takes its place, so both are installed
# without their dependencies, and those (the extra "torchrec") before them.
set -eu
cd "$(dirname "$0")/../../.."
environment="${1:-.venv-torchrec}"
python="$environment/bin/python"
installed='import importlib.metadata as found; [found.version(name) for name in ("torchrec", "pytest-xdist")]'
if ! "$python" -c "$installed" 2>/dev/null; then
    python3 -m venv "$environment"
    "$python" -m pip install --quiet torch==2.13.0
    "$python" -m pip install --quiet tensordict torchmetrics==1.0.3 tqdm pyre-extensions numpy psutil pytest pytest-xdist hypothesis
    "$python" -m pip install --quiet --no-deps fbgemm-gpu-cpu==1.8.0 torchrec==1.8.0
fi
# They are in one file, of which each process takes a half: those in one process and those in two.
exec "$python" -m pytest -q --dist=worksteal -m torchrec tests/pipe/train
