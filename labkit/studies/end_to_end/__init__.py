"""The end-to-end lab: what a training step of the Transformer costs, part by part, predicted and measured.

``worker``    what the rank runs
``study``     parameters, points
``tables``    from samples to tables
``findings``  questions, and what the measurements say
"""
