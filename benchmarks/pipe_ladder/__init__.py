"""The question ``pipe-ladder``: our pipe beside its two ancestors, and what each of its mechanisms earns."""
