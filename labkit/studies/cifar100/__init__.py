"""The CIFAR-100 lab: whole trainings with labkit's wrapper and SyncBatchNorm, compared with
torch's."""
