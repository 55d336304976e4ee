"""Checkpoints of a group of ranks, of one state that all hold, or of a shard per rank.

One state: rank 0 writes and reads, all ranks get what was read. Shards: each rank writes and reads its own file, in one
folder that all of them see.

A checkpoint is there whole or not at all: it is written under another name, put onto the disk, and renamed. It is read
without executing anything it holds: `weights_only` makes tensors and plain values of a pickle and calls nothing else,
and keeps dtypes, strides and what is shared, which JSON would not.
"""

import io
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from labkit.parallel.ranks.messages import broadcast_bytes

PARTIAL = ".partial"
"""At the end of the name of what is not whole yet."""


def save(path: Path | None, state: Any) -> None:
    """Replace the checkpoint by `state` (tensors, numbers, strings, None, in lists and dicts). Other ranks only wait.

    Nothing is written without a path. When it returns, on any rank, the checkpoint is on the disk.
    """
    if path is not None and dist.get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + PARTIAL)
        _write(partial, state)
        partial.replace(path)
        _sync_directory(path.parent)
    dist.barrier()


def load(path: Path | None) -> Any | None:
    """What the checkpoint of rank 0 holds, on every rank and on the CPU; None if there is none."""
    is_there = path is not None and dist.get_rank() == 0 and path.exists()
    content = broadcast_bytes(path.read_bytes() if is_there and path is not None else b"")
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True) if content else None


def save_shards(folder: Path, number: int, state: Any) -> None:
    """Checkpoint `number`, of which each rank has a part; those with lower numbers go when it is whole. A collective.

    It is written as a folder of another name, which is renamed when all parts are on the disk. `state` as for `save`.
    """
    partial = folder / f"{number}{PARTIAL}"
    if dist.get_rank() == 0:
        for left in folder.glob(f"*{PARTIAL}"):
            shutil.rmtree(left)
        partial.mkdir(parents=True)
    dist.barrier()
    _write(partial / f"{dist.get_rank()}.pt", state)
    dist.barrier()
    if dist.get_rank() == 0:
        _sync_directory(partial)
        partial.rename(folder / str(number))
        _sync_directory(folder)
        for older in _whole(folder)[:-1]:
            shutil.rmtree(folder / str(older))
    dist.barrier()


def load_shards(folder: Path) -> tuple[int, Any] | None:
    """Number of the newest checkpoint, and what this rank wrote, on the CPU; None if there is none.

    ValueError for a checkpoint of another number of ranks.
    """
    if not (whole := _whole(folder)):
        return None
    parts = {path.name for path in (folder / str(whole[-1])).iterdir()}
    if parts != {f"{rank}.pt" for rank in range(dist.get_world_size())}:
        raise ValueError(f"expected a checkpoint of {dist.get_world_size()} ranks, got one of {len(parts)}")
    path = folder / str(whole[-1]) / f"{dist.get_rank()}.pt"
    return whole[-1], torch.load(path, map_location="cpu", weights_only=True)


def _whole(folder: Path) -> list[int]:
    """Numbers of the checkpoints that are whole, the newest last."""
    return sorted(int(path.name) for path in folder.glob("*") if path.name.isdigit())


def _write(path: Path, state: Any) -> None:
    """When it returns, the content is on the disk."""
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(directory: Path) -> None:
    """The new name is on the disk as well."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
