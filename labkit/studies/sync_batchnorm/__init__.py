"""The SyncBatchNorm lab: what it costs to normalize by the batch of all ranks, and where that goes.

``alternatives``  the layers and bare collectives that are compared, and the gate
``worker``        what every rank runs
``study``         parameters, points
``analysis``      from samples to tables
``predictions``   what operators, bytes and messages should cost, against what they cost
``trends``        whether the published trends hold
``answers``       what the measurements say
"""
