"""The attention lab: what explicit attention costs in time and memory, and what compiling or tiling changes.

``worker``    what is run for each point
``study``     parameters, points
``tables``    tables from a run
``findings``  what is asked, and what the measurements say
"""
