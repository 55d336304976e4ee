"""Data-parallel training: four ways to average gradients over ranks, under one contract.

``contract``         what all wrappers share: `DataParallel`
``after_backward``   `NaiveDDP`, a collective a parameter; `FlatDDP`, one collective for all
``during_backward``  `OverlappedDDP`, a collective a parameter; `BucketedDDP`, one a bucket
``replicas``         the same model on every rank, or a refusal on every rank
``layout``           how gradients lie in memory
``averaging``        who sums: torch.distributed, or labkit's all-reduce
``buckets``          how parameters are put into buckets
"""

from labkit.parallel.data_parallel.after_backward import FlatDDP, NaiveDDP
from labkit.parallel.data_parallel.contract import DataParallel, UnusedParameterError
from labkit.parallel.data_parallel.during_backward import BucketedDDP, OverlappedDDP

__all__ = ["BucketedDDP", "DataParallel", "FlatDDP", "NaiveDDP", "OverlappedDDP", "UnusedParameterError"]
