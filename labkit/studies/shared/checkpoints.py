"""Checkpoints of all ranks in one file, written by rank 0.

They are read with `weights_only`, which makes tensors and plain values and calls nothing else: a
pickle runs code.
"""

import io
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from labkit.parallel.messages import cpu_group, gather_json


def save_checkpoint(path: Path | None, state: Any) -> None:
    """Replace the checkpoint by rank 0's `state`, whole or not at all. A collective.

    `state`: tensors, numbers, strings and None, in lists and dicts. Without a path, nothing is
    written.
    """
    if path is not None and dist.get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.partial")
        with partial.open("wb") as file:
            torch.save(state, file)
            file.flush()
            # Before the rename: after a power cut the name must not stand for an empty file.
            os.fsync(file.fileno())
        partial.replace(path)
    dist.barrier()


def load_checkpoint(path: Path | None) -> Any | None:
    """Load rank 0's checkpoint on every rank, to the CPU; None if there is none. A collective."""
    content = b""
    if path is not None and dist.get_rank() == 0 and path.exists():
        content = path.read_bytes()
    # Only rank 0 reads: hosts may have no file system in common.
    length = gather_json(len(content))[0]
    if not length:
        return None
    tensor = torch.empty(length, dtype=torch.uint8)
    if content:
        tensor = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    # Between CPUs: NCCL would need the file on the GPU first.
    dist.broadcast(tensor, src=0, group=cpu_group())
    return torch.load(io.BytesIO(tensor.numpy().tobytes()), map_location="cpu", weights_only=True)
