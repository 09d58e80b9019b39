"""Homes that are sharded over the ranks of a ``DeviceMesh``: loads gather parameters, gradients are reduced."""
