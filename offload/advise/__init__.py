"""Says before anything is loaded which plans of a training step fit in a memory, and what they will cost here."""
