"""The data-parallel lab: how gradients should be averaged on this machine, and what that costs a step.

``worker``    what every rank runs
``timeline``  which collectives run during backward, from the profiler
``study``     parameters, points
``analysis``  from samples to tables
``answers``   what the measurements say
"""
