"""``pytest benchmarks``: how long the inner pieces take, each on its own, by pytest-benchmark.

These are no tests of the suite: they tell a change's author what it did to a piece that runs thousands of times in a
step. ``--benchmark-compare`` puts two runs side by side; ``--benchmark-disable`` runs each once.
"""
