"""What every question shares: the environment it ran in, processes for its rungs, memory, tables and pictures."""
