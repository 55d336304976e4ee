"""Checkpoints of a group of ranks that hold the same state: rank 0 writes and reads, all ranks get what was read.

A file is there whole or not at all: it is written under another name, put onto the disk, and renamed. It is read
without executing anything it holds: `weights_only` makes tensors and plain values of a pickle and calls nothing else,
and keeps dtypes, strides and what is shared, which JSON would not.
"""

import io
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from labkit.parallel.ranks.messages import broadcast_bytes


def save(path: Path | None, state: Any) -> None:
    """Replace the checkpoint by `state` (tensors, numbers, strings, None, in lists and dicts). Other ranks only wait.

    Nothing is written without a path. When it returns, on any rank, the checkpoint is on the disk.
    """
    if path is not None and dist.get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + ".partial")
        with partial.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        _sync_directory(path.parent)
    dist.barrier()


def load(path: Path | None) -> Any | None:
    """What the checkpoint of rank 0 holds, on every rank and on the CPU; None if there is none."""
    is_there = path is not None and dist.get_rank() == 0 and path.exists()
    content = broadcast_bytes(path.read_bytes() if is_there and path is not None else b"")
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True) if content else None


def _sync_directory(directory: Path) -> None:
    """The new name is on the disk as well."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
