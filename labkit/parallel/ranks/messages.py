"""JSON and checkpoints among ranks, without unpickling.

torch's collectives of objects unpickle a peer's bytes, and a pickle runs code. So JSON travels in tensors of uint8, and
a checkpoint is read with `weights_only`, which makes tensors and plain values and calls nothing else.
"""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist


def gather_json(value: Any, group: dist.ProcessGroup | None = None, device: torch.device | None = None) -> list[Any]:
    """Return every rank's JSON-able `value`, by rank of the group (None: all ranks). A collective.

    It travels in tensors on `device`; None: the CPU, or the current GPU if the group's backend is NCCL.
    """
    own = _to_tensor(json.dumps(value).encode(), group)
    own = own if device is None else own.to(device)
    lengths = [torch.zeros(1, dtype=torch.int64, device=own.device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, torch.tensor([own.numel()], device=own.device), group=group)
    counts = [int(length) for length in lengths]
    padded = torch.zeros(max(counts), dtype=torch.uint8, device=own.device)
    padded[: own.numel()] = own
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded, group=group)
    return [json.loads(_to_bytes(part[:count])) for part, count in zip(parts, counts, strict=True)]


def save_checkpoint(path: Path | None, state: Any) -> None:
    """Replace the checkpoint by rank 0's `state` (tensors, numbers, strings, None, in lists and dicts). A collective.

    The file is there whole or not at all: it is written under another name, synced to disk, and renamed. Nothing is
    written without a path.
    """
    if path is not None and dist.get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.partial")
        with partial.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    dist.barrier()


def load_checkpoint(path: Path | None) -> Any | None:
    """Load rank 0's checkpoint on every rank, to the CPU; None if there is none. A collective."""
    is_there = path is not None and dist.get_rank() == 0 and path.exists()
    content = _to_tensor(path.read_bytes() if is_there and path is not None else b"")
    length = torch.tensor([content.numel()], device=content.device)
    dist.broadcast(length, src=0)
    if not length:
        return None
    if dist.get_rank() != 0:
        content = torch.empty(int(length), dtype=torch.uint8, device=content.device)
    dist.broadcast(content, src=0)
    return torch.load(io.BytesIO(_to_bytes(content)), map_location="cpu", weights_only=True)


def _to_tensor(content: bytes, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """(bytes,) uint8, on the device that the process group needs."""
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    return torch.from_numpy(np.frombuffer(content, dtype=np.uint8).copy()).to(device)


def _to_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().numpy().tobytes()
