"""Messages between the stages of a pipeline: tensors of any shape, or word that there is none.

Every message begins with a header: a tensor follows, or nothing follows (no gradient), or a rank
has failed. Shapes and dtypes travel in the header, so they may change from message to message.

A second message costs both ranks as much as the first one. Between CPUs, the header therefore has
room behind it for a tensor like the last one on the same way, and most tensors fit. One that
differs follows by itself.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from labkit.parallel.exchange import exchange
from labkit.parallel.messages import cpu_group
from labkit.parallel.prepare import FLOAT_TYPES
from labkit.parallel.transport import AUTO, Transport

NOTHING = 0
TENSOR = 1
FAILURE = 2
"""What follows a header."""
MAX_DIMS = 12
HEADER_LENGTH = 4 + MAX_DIMS  # what follows, whether it requires a gradient, dtype, dims, sizes
HEADER_BYTES = 8 * HEADER_LENGTH  # 128, so that a tensor behind it is aligned
Header = list[int]


class Failed(NamedTuple):
    """In place of a tensor: the rank that should have made it has failed."""


class Messages:
    """Sends and receives for the stages of one rank.

    A way is what the messages of one stage's outputs, or of its gradients, have in common. Both
    ranks name it alike, and call `send` and `receive` once for each message on it.
    """

    def __init__(
        self, group: dist.ProcessGroup, transport: Transport, device: torch.device
    ) -> None:
        self._group = group
        self._transport = transport
        self._device = device
        # To read a header from a GPU would wait for all that its stream has to do.
        self._header_transport = transport if device.type == "cpu" else AUTO
        self._last: dict[Hashable, Header] = {}
        """Headers of the last tensors between CPUs, by way; the same on both ranks."""

    def send(self, content: Tensor | Failed | None, target: int, way: Hashable) -> None:
        """Send what a stage has made to a group rank."""
        header = make_header(content)
        message, header_part, room = self._make_message(way)
        header_part.copy_(torch.tensor(header))
        fits = header == self._last.get(way)
        if fits:
            assert isinstance(content, Tensor)
            room.copy_(content)
        exchange(
            message, target, None, group=cpu_group(self._group), transport=self._header_transport
        )
        if isinstance(content, Tensor) and not fits:
            exchange(content, target, None, group=self._group, transport=self._transport)
        self._remember(way, header)

    def receive(self, source: int, way: Hashable) -> Tensor | Failed | None:
        """Receive what a group rank sends; a tensor is a leaf on this rank's device."""
        message, header_part, room = self._make_message(way)
        exchange(
            send=None,
            to=None,
            receive=message,
            source=source,
            group=cpu_group(self._group),
            transport=self._header_transport,
        )
        header = header_part.tolist()
        if header == self._last.get(way):
            return _like_header(room.detach(), header)
        content = empty_like_header(header, self._device)
        if isinstance(content, Tensor):
            landing = content.detach()
            exchange(None, None, landing, source, self._group, transport=self._transport)
        self._remember(way, header)
        return content

    def _make_message(self, way: Hashable) -> tuple[Tensor, Tensor, Tensor]:
        """Return memory for a message, (n,), its header, int64, and the room for a tensor."""
        shape = [0]
        dtype = torch.int64
        if way in self._last:
            shape, dtype = _describe(self._last[way])
        # One tensor of the last dtype for both parts: a message has one dtype.
        n_header = HEADER_BYTES // dtype.itemsize
        message = torch.empty(n_header + torch.Size(shape).numel(), dtype=dtype)
        return message, message[:n_header].view(torch.int64), message[n_header:].view(shape)

    def _remember(self, way: Hashable, header: Header) -> None:
        if header[0] == TENSOR and self._device.type == "cpu":
            self._last[way] = header
        else:
            # A GPU's tensors never travel behind a header, which goes between CPUs.
            self._last.pop(way, None)


def make_header(content: Tensor | Failed | None) -> Header:
    """Return the numbers that announce a message."""
    if content is None:
        return [NOTHING, *[0] * (HEADER_LENGTH - 1)]
    if isinstance(content, Failed):
        return [FAILURE, *[0] * (HEADER_LENGTH - 1)]
    if content.dim() > MAX_DIMS:
        raise ValueError(f"expected at most {MAX_DIMS} dimensions, got {tuple(content.shape)}")
    dtype = FLOAT_TYPES.index(content.dtype)
    sizes = [*content.shape, *[0] * (MAX_DIMS - content.dim())]
    return [TENSOR, int(content.requires_grad), dtype, content.dim(), *sizes]


def empty_like_header(header: Sequence[int], device: torch.device) -> Tensor | Failed | None:
    """Return a tensor to receive what a header announces, or what stands for no tensor."""
    if header[0] == FAILURE:
        return Failed()
    if header[0] == NOTHING:
        return None
    shape, dtype = _describe(header)
    return _like_header(torch.empty(shape, dtype=dtype, device=device), header)


def _describe(header: Sequence[int]) -> tuple[list[int], torch.dtype]:
    """Return shape and dtype of the tensor that a header announces."""
    _, _, dtype, dims, *sizes = header
    return sizes[:dims], FLOAT_TYPES[dtype]


def _like_header(content: Tensor, header: Sequence[int]) -> Tensor:
    """Let a tensor require a gradient if its header says so, and gradients are computed."""
    return content.requires_grad_(bool(header[1]) and torch.is_grad_enabled())
