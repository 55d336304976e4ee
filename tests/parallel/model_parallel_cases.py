"""What the tests of tensor, pipeline and context parallelism share: errors, refusals, and messages
left out."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labkit.parallel.collectives import all_reduce
from tests.parallel.shared_ranks import find_accepted

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


Attempts = Sequence[tuple[str, Callable[[], object]]]
"""Calls that must be refused, each with a part of the message."""


def find_refusals_that_fail(attempts: Attempts) -> list[str]:
    """Return what does not raise one line with its text, or leaves a message behind."""
    wrong = []
    for attempt in attempts:
        total = torch.ones(3)
        wrong += find_accepted([attempt])
        all_reduce(total, op="sum")
        wrong += (
            []
            if total.tolist() == [dist.get_world_size()] * 3
            else [f"a message after {attempt[0]}"]
        )
    return wrong
