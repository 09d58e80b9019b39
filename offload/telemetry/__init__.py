"""Telemetry: counters, traces and timelines of what a model did."""
