"""What the tests of tensor, pipeline and context parallelism share: errors, refusals, losses."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labkit.parallel.collectives import all_reduce
from labkit.parallel.losses import summed_loss
from tests.parallel.shared_ranks import assert_refused

EXACT = 1e-10
TOLERANCES = {torch.float64: EXACT, torch.float32: 128 * torch.finfo(torch.float32).eps}


def furthest(values: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Largest difference of values from those expected by the same name, relative if these are
    large; NaN is infinitely far, since max drops it."""
    errors = [
        (x.double() - expected[name]).abs().max() / (1 + expected[name].abs().max())
        for name, x in values.items()
    ]
    return float(torch.stack(errors).max().nan_to_num(torch.inf))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Gradients of all parameters by name, whole if they are in shards."""
    grads: dict[str, Any] = {
        name: p.grad for name, p in model.named_parameters() if p.grad is not None
    }
    return {
        name: grad.full_tensor() if hasattr(grad, "full_tensor") else grad.detach()
        for name, grad in grads.items()
    }


class TiedHead(nn.Module):
    """Logits by the matrix of an embedding."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.weight = embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t()


def masked_mean(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss over all targets that count, of one process."""
    total, count = summed_loss(logits, targets)
    return total / count.clamp(min=1)


Attempts = Sequence[tuple[str, Callable[[], object]]]
"""Calls that must be refused, each with a part of the message."""


def assert_refused_everywhere(attempts: Attempts) -> None:
    """Each call raises one line with its text on this rank, and leaves no message behind."""
    for expected, call in attempts:
        assert_refused(expected, call)
        total = torch.ones(3)
        all_reduce(total, op="sum")
        assert total.tolist() == [dist.get_world_size()] * 3, f"a message after {expected}"
