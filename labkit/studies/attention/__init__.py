"""The attention lab: what explicit attention costs in time and memory, and what compiling or tiling changes.

``worker``   what is run for each point
``study``    parameters, points
``analysis`` tables from a run
``trends``   published trends
``answers``  what the measurements say
"""
