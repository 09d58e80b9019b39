"""The models of the benchmarks: one transformer block, a stack of it, and a text encoder made of it."""
