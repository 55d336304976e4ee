"""The all-reduce lab: what it costs to average a tensor over ranks, and which algorithm does it best.

``worker``   what every rank runs
``study``    parameters, points, predictions
``answers``  what the measurements say
"""
