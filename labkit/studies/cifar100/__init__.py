"""The CIFAR-100 lab: whole trainings with labkit's wrapper and SyncBatchNorm, beside torch's.

``training``  how one implementation trains: order of images, updates, validation
``data``      images handed out by rank 0
``worker``    what every rank runs
``study``     parameters, points
``samples``   from rows to one sample per training and epoch
``tables``    from samples to what findings and figures are made of
``findings``  what the lab asks, and how a run answers
"""
