"""The question ``build-huge``: a model larger than the memory that its process may have."""
