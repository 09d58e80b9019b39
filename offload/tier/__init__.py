"""Where bytes rest: one small contract, and a module for each kind of place."""
