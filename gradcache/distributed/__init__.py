"""GradCache with torch.distributed: gathered representations, averaged gradients, towers sharded by FSDP."""
