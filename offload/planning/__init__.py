"""Planning: from layers and a number of bytes to the ordered actions of a step, before anything runs."""
