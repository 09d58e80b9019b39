"""Microbenchmarks: ``python -m pytest -n0 benchmarks`` times single functions with pytest-benchmark.

They are not part of the test suite: they show what a change did to a function that runs thousands of times in a step.
``--benchmark-compare`` puts two runs side by side; ``--benchmark-disable`` runs each once.
"""
