"""The gradient-buckets lab: how long a data-parallel step waits for its gradients, and whether the bucket size matters.

``worker``    what every rank runs
``study``     parameters, points
``tables``    from samples to tables
``model``     what a step should wait, by the calibrated all-reduce, and fitted
``findings``  the questions, and what a run says of them
"""
