"""Data-parallel training: four ways to average gradients over ranks, under one contract.

``base``             what all wrappers share: `DataParallel`
``synchronous``      `NaiveDDP`, a collective per parameter; `FlatDDP`, one collective for all
``overlapped``       `BucketedDDP`, a collective per bucket; `OverlappedDDP`, one per parameter
``consistency``      the same model on every rank, or a refusal on every rank
``hooks``            how a wrapper hears of gradients
``layout``           how gradients lie in memory
``reducer``          what sums: torch.distributed, or labkit's all-reduce
``join``             uneven inputs
"""

from labkit.parallel.data_parallel.base import DataParallel, UnusedParameterError
from labkit.parallel.data_parallel.overlapped import BucketedDDP, OverlappedDDP
from labkit.parallel.data_parallel.synchronous import FlatDDP, NaiveDDP

__all__ = ["BucketedDDP", "DataParallel", "FlatDDP", "NaiveDDP", "OverlappedDDP", "UnusedParameterError"]
