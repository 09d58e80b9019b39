"""Balances: how many layers each device of a pipeline gets, from measured times or sizes."""
