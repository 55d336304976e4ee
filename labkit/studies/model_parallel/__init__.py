"""Tensor and pipeline parallelism, and the best axis for one model on the same ranks."""
