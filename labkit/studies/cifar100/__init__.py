"""The CIFAR-100 lab: whole trainings with labkit's wrapper and SyncBatchNorm, beside torch's."""
