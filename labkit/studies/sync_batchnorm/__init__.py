"""The SyncBatchNorm lab: what it costs to normalize by the batch of all ranks, and where that
goes."""
