"""The question ``offload-step``: the price of streaming a model from disk."""
