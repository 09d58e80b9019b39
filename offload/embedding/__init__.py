"""Embedding tables at home, of which only the rows of a batch travel; and an optimizer for them."""
