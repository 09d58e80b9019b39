"""GradCache on many processes: gathered representations, reduced gradients, sharded towers."""
