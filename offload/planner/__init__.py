"""Plans the steps of one model under its limit of memory, from what its first steps have measured."""
