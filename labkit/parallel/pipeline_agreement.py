"""What the ranks of a pipeline, and of pipelines with other batches, agree on in a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler

from labkit.parallel.agreement import agree_per_pass, describe_values

Tied = Sequence[Mapping[int, str]]
"""Of each parameter that several ranks have, its name on each of them, by rank."""
REMOVED = -1  # in the place of whether a copy is trained


def agree_on_inputs(pipeline: Any, inputs: Tensor) -> None:
    """Check the inputs of an evaluation, which must be the same on all ranks of a pipeline."""

    def describe(group: dist.ProcessGroup) -> dict[str, str]:
        _check_batch(inputs, inputs)
        return {"inputs": describe_values(inputs, group)}

    def agree() -> None:
        agree_per_pass("inputs", partial(describe, pipeline.group), pipeline.group)

    _agree_with_parts("inputs", agree, describe, pipeline.tensor_groups)


def agree_on_batch(
    pipeline: Any,
    inputs: Tensor,
    targets: Tensor,
    loss_function: object,
    tied: Tied,
    data_group: dist.ProcessGroup | None,
    scaler: GradScaler | None,
) -> float:
    """Check inputs and targets; return the mean number of targets over `data_group`, at least 1.

    What one pipeline refuses is refused by those with the other parts of its layers, and of the
    other batches, too. Ranks must train all copies of a tied parameter, or none. By the scale of
    `scaler` the last rank multiplies the loss, and each rank divides its gradients.
    """
    group = pipeline.group
    flags = []
    if tied:
        parameters = dict(pipeline.named_parameters(remove_duplicate=False))
        local = [parameters.get(names.get(group.rank(), "")) for names in tied]
        flags = [REMOVED if each is None else int(each.requires_grad) for each in local]

    def describe(group: dist.ProcessGroup) -> dict[str, str]:
        _check_batch(inputs, targets, pipeline.micro_batches, loss_function)
        return {
            "inputs": describe_values(inputs, group),
            "targets": describe_values(targets, group),
            "the scale of the loss": "none" if scaler is None else str(scaler.get_scale()),
        }

    def agree() -> None:
        of_pipeline = partial(describe, group)
        by_rank = agree_per_pass("inputs and targets", of_pipeline, group, numbers=flags)
        for number, names in enumerate(tied):
            _check_copies(names, [by_rank[rank][number] for rank in names])

    problem: Exception | None = None
    try:
        _agree_with_parts("inputs and targets", agree, describe, pipeline.tensor_groups)
    except Exception as error:
        problem = error
    if data_group is None:
        if problem is not None:
            raise problem
        return max(1.0, targets.numel())
    # Targets that were refused may be no tensor: they are not counted.
    n_targets = targets.numel() if problem is None else 0
    counts = agree_on_success("step", problem, data_group, [n_targets])
    return max(1.0, sum(count for (count,) in counts) / len(counts))


def _agree_with_parts(
    subject: str,
    agree: Callable[[], None],
    describe: Callable[[dist.ProcessGroup], Mapping[str, str]],
    tensor_groups: Sequence[dist.ProcessGroup],
) -> None:
    """Agree in a pipeline by `agree`, then with those that have other parts of its layers.

    These are another pipeline, with a batch of its own to compare.
    """
    problem: Exception | None = None

    def describe_outcome(group: dist.ProcessGroup) -> Mapping[str, str]:
        if problem is not None:
            raise problem
        return describe(group)

    try:
        agree()
    except Exception as error:
        problem = error
    for group in tensor_groups:
        try:
            agree_per_pass(subject, partial(describe_outcome, group), group)
        except Exception as error:
            problem = error
    if problem is not None:
        raise problem


def _check_batch(
    inputs: Tensor, targets: Tensor, micro_batches: int = 1, loss_function: object = None
) -> None:
    """Raise ValueError for a batch that cannot be cut, or has a graph, and for another loss."""
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
    if targets.requires_grad:
        raise ValueError(
            "expected targets without a gradient, which only the last stage could give: detach them"
        )
    if isinstance(loss_function, nn.Module):
        trained = [name for name, p in loss_function.named_parameters() if p.requires_grad]
        if trained:
            # Only the last stage would train it, with a gradient of which the scale is wrong.
            raise ValueError(
                f"expected a loss without parameters, got {trained[0]}: make what has it a layer"
            )


def _check_copies(names: Mapping[int, str], flags: Sequence[int]) -> None:
    """Raise ValueError, the same on all ranks, unless the copies of a tied weight stay equal."""
    copies = " and ".join(names.values())
    if REMOVED in flags:
        raise ValueError(
            f"expected {copies}, which are tied, and one was removed: change layers before"
        )
    if len({*flags}) > 1:
        raise ValueError(f"expected {copies}, which are tied, all frozen or all trained")


def sum_over(
    group: dist.ProcessGroup, total: float, count: float, error: Exception | None
) -> tuple[float, float, int]:
    """Return a loss's sum and count over all batches, and the number of these batches.

    `error`: of this rank's pipeline. It is raised here, and ValueError with its text elsewhere.
    """
    # The agreement carries integers: the bits of a float64 are one, and lose nothing.
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
