"""The kernels lab: what a pass and a training step of the Transformer are made of, by the profiler.

``attention``  explicit attention in named parts
``worker``     what a rank runs: clock and profiler in turns
``study``      parameters and points
``tables``     from samples to tables
``findings``   questions, and what the measurements say
"""
