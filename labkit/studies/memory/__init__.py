"""The memory lab: where the memory of a training step of the Transformer goes, measured and
counted."""
