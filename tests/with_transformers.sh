#!/bin/sh
# Runs the tests that need transformers, peft and sentence-transformers in an environment of their own.
#
#   tests/with_transformers.sh [DIRECTORY]
#
# DIRECTORY keeps the environment (default: .venv-transformers).
#
# torch comes first and alone: what asks for another one would fetch its CUDA build. The releases are those that the
# losses are compared with.
set -eu
cd "$(dirname "$0")/.."
environment="${1:-.venv-transformers}"
python="$environment/bin/python"
installed='import importlib.metadata as found; [found.version(name) for name in ("sentence-transformers", "lightning", "pytest-xdist")]'
if ! "$python" -c "$installed" 2>/dev/null; then
    python3 -m venv "$environment"
    "$python" -m pip install --quiet torch==2.13.0
    "$python" -m pip install --quiet transformers==5.23.0 sentence-transformers==6.2.0 accelerate==1.15.0 \
        datasets==5.2.0 peft==0.21.2 lightning==2.6.6 psutil pytest pytest-xdist hypothesis
fi
# Nothing is looked up: every model is built from a configuration. One of the files takes longer than all others.
HF_HUB_OFFLINE=1 exec "$python" -m pytest -q --dist=worksteal \
    tests/offload/blocks/test_transformers.py tests/offload/blocks/test_trainers.py \
    tests/gradcache/test_sentence_transformers.py \
    tests/gradcache/test_huggingface.py tests/offload/advise/test_advise.py tests/benchmarks/test_gpu.py \
    tests/test_documents.py::test_the_blocks_of_a_page_that_needs_another_package_run
