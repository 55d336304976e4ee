"""The memory lab: where the memory of a training step goes, measured and counted."""
