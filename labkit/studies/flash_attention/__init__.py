"""The FlashAttention lab: every implementation of causal attention that runs here, from short sequences to long.

``worker``    what is run for each point
``study``     parameters, points
``tables``    tables from a run
``recorded``  a GPU run of the project, for machines without one
``findings``  what is asked, and what the measurements say
"""
