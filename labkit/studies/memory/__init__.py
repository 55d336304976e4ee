"""The memory lab: where the memory of a training step of the Transformer goes, measured and counted.

``worker``    what is measured: the allocator's peak, one block, checkpointing
``counting``  what is counted: the same step on tensors without memory, storage by storage
``study``     parameters, points, what does not fit
``tables``    what findings and figures are made of
``findings``  what the lab asks, and how a run answers
"""
