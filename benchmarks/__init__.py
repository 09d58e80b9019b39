"""Memory against latency, measured side by side: ``python -m benchmarks`` lists the benchmarks."""
