"""The command ``gpu``: everything that needs a GPU, in one go."""
