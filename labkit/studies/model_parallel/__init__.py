"""Tensor and pipeline parallelism, and which axis of parallelism is best for one model on the same
ranks."""
