"""Machines that are not here: GPUs of ten kinds, their drivers, compilers, streams and NCCL."""
