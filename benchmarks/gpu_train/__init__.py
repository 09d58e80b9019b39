"""The question ``gpu-train``: a model with full Adam on one GPU, in how much memory and how fast?"""
