"""The memory lab: where the memory of a training step of the Transformer goes, measured and counted.

``worker``    what is measured: the allocator's peak, one block, checkpointing
``counting``  what is counted: the same step on tensors without memory, storage by storage
``study``     parameters, points, what does not fit
``analysis``  the tables behind figures and answers
``answers``   what the bytes say
``trends``    whether the published peaks can be, and whether their trends hold
"""
