"""The harness: one process for each case, memory and time measured from outside, results as text, JSON and picture."""
