"""Streams shards of weights through device slots and offloads their gradients, on lanes that overlap with compute."""
