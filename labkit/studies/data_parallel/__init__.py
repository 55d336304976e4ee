"""The data-parallel lab: how gradients should be averaged on this machine, and what that costs a step.

``worker``        what every rank runs
``alternatives``  what is compared: ways to train a workload
``timeline``      which collectives run during backward, from the profiler
``study``         parameters, points
``tables``        from samples to tables
``findings``      the questions, and what a run says of them
"""
