"""The kernels lab: what a pass and a training step of the Transformer are made of, by the profiler."""
