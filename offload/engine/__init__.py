"""A walk over the cells of a step, forward and back: what runs, what is kept, and what is left behind."""
