"""The executor: forward and backward of a model as cells (shard, micro-batch), in the order of a plan."""
