"""What ranks tell one another besides tensors: JSON and bytes in tensors of uint8.

torch's collectives of objects unpickle what comes from a peer, and a pickle runs code.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
import torch.distributed as dist


def gather_json(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every rank's JSON-able `value`, by rank of the group (None: all ranks), on every rank. A collective."""
    own = _tensor_of(json.dumps(value).encode(), group)
    lengths = [torch.zeros(1, dtype=torch.int64, device=own.device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, torch.tensor([own.numel()], device=own.device), group=group)
    counts = [int(length) for length in lengths]
    padded = torch.zeros(max(counts), dtype=torch.uint8, device=own.device)
    padded[: own.numel()] = own
    everybody = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(everybody, padded, group=group)
    return [json.loads(_bytes_of(of_rank[:count])) for of_rank, count in zip(everybody, counts, strict=True)]


def broadcast_json(value: Any) -> Any:
    """Rank 0's JSON-able `value`, on every rank; what the others give is not looked at. A collective."""
    return json.loads(broadcast_bytes(json.dumps(value).encode() if dist.get_rank() == 0 else b""))


def broadcast_bytes(content: bytes) -> bytes:
    """Rank 0's bytes, on every rank; what the others give is not looked at. A collective."""
    own = _tensor_of(content)
    length = torch.tensor([own.numel()], device=own.device)
    dist.broadcast(length, src=0)
    if dist.get_rank() != 0:
        own = torch.empty(int(length), dtype=torch.uint8, device=own.device)
    if own.numel():
        dist.broadcast(own, src=0)
    return _bytes_of(own)


def _tensor_of(content: bytes, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """(bytes,) uint8, where the process group wants it."""
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    return torch.from_numpy(np.frombuffer(content, dtype=np.uint8).copy()).to(device)


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().numpy().tobytes()
