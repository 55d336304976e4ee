"""The SyncBatchNorm lab: what normalizing by the batch of all ranks costs."""
