"""The gradient-buckets lab: how long a data-parallel step waits for its gradients, and whether the bucket size matters.

``worker``    what every rank runs
``study``     parameters, points
``tables``    from samples to tables
``model``     the handout's model of the waiting, predicted and fitted
``findings``  the questions, and what a run says of them
"""
