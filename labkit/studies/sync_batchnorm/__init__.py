"""The SyncBatchNorm lab: what it costs to normalize by the batch of all ranks, and where that goes.

``alternatives``  the layers and bare collectives that are compared, and the gate
``worker``        what every rank runs
``study``         parameters, points
``tables``        from samples to tables
``predictions``   what operators, bytes and messages should cost, against what they cost
``findings``      the questions, and what a run says of them
"""
