"""Forms of weights in their homes: quantised tensors taken apart, and float32 weights in fewer bytes."""
