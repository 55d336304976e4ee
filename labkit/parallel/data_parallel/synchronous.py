"""Gradients averaged when backward is over: simple, and nothing is hidden behind it."""

import torch
from torch import Tensor

from labkit.parallel.data_parallel.base import DataParallel
from labkit.parallel.data_parallel.layout import flat_view, gradient_to_write


class NaiveDDP(DataParallel):
    """One collective per parameter, one after the other, after backward: as many latencies as parameters."""

    def _finish(self, pending: list[int]) -> None:
        for parameter in self._parameters_in_order:
            self._reducer.run(flat_view(gradient_to_write(parameter)), "mean")


class FlatDDP(DataParallel):
    """All gradients of a dtype copied into one tensor, one collective, copied back: twice the memory."""

    def _finish(self, pending: list[int]) -> None:
        alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for parameter in self._parameters_in_order:
            gradient = gradient_to_write(parameter)
            alike.setdefault((gradient.dtype, gradient.device), []).append(flat_view(gradient))
        for gradients in alike.values():
            flat = torch.cat(gradients)
            self._reducer.run(flat, "mean")
            torch._foreach_copy_(gradients, flat.split([gradient.numel() for gradient in gradients]))
