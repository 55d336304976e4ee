"""What the ranks of a pipeline, and of pipelines with other batches, agree on in a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from labkit.parallel.agreement import agree_per_pass, describe_values


def check_batch(inputs: Tensor, targets: Tensor, micro_batches: int = 1) -> None:
    """Raise ValueError for a batch that cannot be cut, and for inputs with a graph."""
    shapes = f"{tuple(inputs.shape)} inputs and {tuple(targets.shape)} targets"
    is_batch = inputs.dim() > 0 and len(inputs) > 0 and len(inputs) == len(targets)
    if not is_batch or len(inputs) % micro_batches:
        raise ValueError(
            f"expected a batch that {micro_batches} micro-batches divide, got {shapes}"
        )
    if inputs.grad_fn is not None:
        # Every rank has such a graph, and only the first stage could give it a gradient.
        raise ValueError(
            f"expected inputs without a graph, got some of {type(inputs.grad_fn).__name__}:"
            " detach them, or make what computes them a layer"
        )


def agree_on_batch(
    inputs: Tensor,
    targets: Tensor,
    micro_batches: int,
    group: dist.ProcessGroup,
    data_group: dist.ProcessGroup | None,
) -> float:
    """Check a batch; return the mean number of targets per batch of `data_group`, at least 1.

    What one pipeline refuses is refused by those of the other batches, too.
    """

    def describe() -> dict[str, str]:
        check_batch(inputs, targets, micro_batches)
        return {
            "inputs": describe_values(inputs, group),
            "targets": describe_values(targets, group),
        }

    if data_group is None:
        agree_per_pass("inputs and targets", describe, group)
        return max(1.0, targets.numel())
    problem: Exception | None = None
    try:
        agree_per_pass("inputs and targets", describe, group)
    except ValueError as error:
        problem = error
    counts = agree_on_success("step", problem, data_group, [targets.numel()])
    return max(1.0, sum(count for (count,) in counts) / len(counts))


def sum_over(
    group: dist.ProcessGroup, total: float, count: float, error: Exception | None
) -> tuple[float, float, int]:
    """Return a loss's sum and count over all batches, and the number of these batches.

    `error`: of this rank's pipeline. It is raised here, and ValueError with its text elsewhere.
    """
    bits = torch.tensor([total, count], dtype=torch.float64).view(torch.int64).tolist()
    by_rank = agree_on_success("step", error, group, bits)
    totals = torch.tensor(by_rank).view(torch.float64).sum(0).tolist()
    return totals[0], totals[1], len(by_rank)


def agree_on_success(
    subject: str, error: Exception | None, group: dist.ProcessGroup, numbers: Sequence[int]
) -> list[list[int]]:
    """Return the numbers of all ranks. `error` is raised on this rank, ValueError elsewhere."""

    def describe() -> dict[str, str]:
        if error is not None:
            raise error
        return {}

    return agree_per_pass(subject, describe, group, numbers=numbers)
