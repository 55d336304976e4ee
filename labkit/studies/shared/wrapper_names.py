"""What the wrappers of data parallelism are called in sentences."""

from labkit.parallel.data_parallel import TORCH

WRAPPER_NAMES = {
    TORCH: "torch's DDP",
    "naive": "NaiveDDP",
    "flat": "FlatDDP",
    "overlapped": "OverlappedDDP",
    "bucketed": "BucketedDDP",
    "bucketed_shared": "BucketedDDP through shared memory",
    "naive_shared": "NaiveDDP through shared memory",
}
