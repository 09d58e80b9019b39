"""Microbenchmarks of functions that run often, with pytest-benchmark: ``python -m pytest -n0 benchmarks/micro``.

The test suite runs each once. ``--benchmark-compare`` shows two runs side by side.
"""
