"""Agreement before a call's first message: all ranks go on, or all raise the same kind of one-line ValueError."""

import hashlib

import torch
import torch.distributed as dist
from torch import Tensor

from labkit.parallel.collectives import all_gather
from labkit.parallel.transport import AUTO, find_transport
from labkit.parallel.transport.base import Transport

NOTE_BYTES = 16
"""Bytes that a rank sends to each other rank, as int64."""


def agree(
    subject: str,
    description: str,
    group: dist.ProcessGroup | None,
    *,
    device: torch.device,
    refusal: ValueError | None = None,
    transport: str | Transport = AUTO,
) -> None:
    """Raise ValueError on every rank of the group unless all pass the same description of `subject`, and no refusal.

    A collective: one all-gather of two int64 per rank. `refusal`: why this rank cannot go on, raised here.
    """
    connection = find_transport(group, device, transport)
    notes = torch.zeros(connection.world_size, 2, dtype=torch.int64, device=device)
    digest = int.from_bytes(hashlib.sha256(description.encode()).digest()[:7])
    notes[connection.rank] = torch.tensor([refusal is not None, digest])
    all_gather(notes, group, transport=connection)
    if refusal is not None:
        raise refusal
    rows = notes.tolist()
    for rank, (is_refused, _) in enumerate(rows):
        if is_refused:
            raise ValueError(f"expected valid {subject} on every rank, and rank {rank} refused; its error says why")
    if others := [rank for rank, row in enumerate(rows) if row[1] != rows[0][1]]:
        raise ValueError(f"expected the same {subject} on every rank; those of ranks {others} differ from rank 0's")


def describe_tensor(tensor: Tensor) -> str:
    """Describe shape and dtype, and of integers the content, too: a checksum that depends on their order."""
    text = f"{tuple(tensor.shape)} {tensor.dtype}"
    if tensor.dtype.is_floating_point or tensor.is_complex():
        return text
    flat = tensor.detach().flatten().to(torch.int64)
    return f"{text} {int((flat * torch.arange(1, flat.numel() + 1, device=flat.device)).sum())}"
