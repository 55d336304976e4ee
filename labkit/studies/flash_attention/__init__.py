"""The FlashAttention lab: every implementation of causal attention that runs here, from short sequences to long.

``worker``   what is run for each point
``study``    parameters, points
``analysis`` tables from a run
``recorded`` a GPU run of the project, for machines without one
``trends``   published trends
``answers``  what the measurements say
"""
