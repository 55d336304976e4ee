"""Training on several ranks: collectives, wrappers, sharding, and parallelism over tensors, layers
and sequences.

``collectives``    all-reduce by several algorithms, reduce-scatter, all-gather
``transport``      how ranks exchange memory: shared memory, gloo, NCCL
``exchange``       whole tensors from one rank to another
``data_parallel``  wrappers that average gradients
``sharding``       `ShardedOptimizer` (ZeRO-1) and `FSDP` (ZeRO-2 and 3)
``sync_batchnorm`` batch normalization over all ranks
``tensor``, ``pipeline``, ``context``  a layer's matrices, the layers, or the sequence over ranks
``launch``         a worker on a group of ranks; ``ranks`` has the processes, forked by a server
``traffic``        bytes that collectives send; ``messages``: JSON among ranks

The other files are parts of these.
"""
