"""Contrastive batches larger than memory: representations first, their gradients next, the encoders' gradients last."""
