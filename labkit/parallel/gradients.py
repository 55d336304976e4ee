"""Gradients of a model that several ranks train together: clipping, overflow, random numbers.

model = tensor_parallel(model, group)             or a Pipeline: each rank has its parameters
loss.backward()
any_rank_overflowed(model.parameters(), [group])  float16: before scaler.unscale_ or scaler.step
norm = clip_grad_norm_(model.parameters(), 1.0, [group])
optimizer.step()
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from labkit.parallel.cut_tensors import CutGradient
from labkit.parallel.layouts import find_layout
from labkit.parallel.transport import Group, member_group


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[Tensor],
    max_norm: float,
    groups: Sequence[Group] = (None,),
    *,
    norm_type: float = 2.0,
) -> Tensor:
    """Scale gradients so that their norm over all ranks is at most `max_norm`. A collective.

    Returns the norm before, a float64 scalar, the same on all ranks: that of one process.
    `groups`: the tensor-parallel one, the pipeline's, and FSDP's; not those whose ranks have equal
    gradients after averaging. Each gradient counts once, however many ranks have it. A rank without
    gradients takes part, too. As `torch.nn.utils.clip_grad_norm_` otherwise.
    """
    parameters = list(parameters)
    members = [member_group(group) for group in groups]
    is_max = norm_type == float("inf")
    by_copies: dict[int, list[Tensor]] = {}
    for p in parameters:
        if p.grad is not None:
            by_copies.setdefault(_count_copies(p, members), []).append(_local(p.grad))
    device = next((p.device for p in parameters), torch.device("cpu"))
    # one dtype on all ranks: a stage may have other ones, or no parameters at all
    total = torch.zeros((), dtype=torch.float64, device=device)
    for copies, grads in by_copies.items():
        norm = torch.nn.utils.get_total_norm(grads, norm_type).to(total)
        if is_max:
            total = torch.maximum(total, norm)
        else:
            # all copies are added below
            total += norm**norm_type / copies
    op = dist.ReduceOp.SUM
    if is_max:
        op = dist.ReduceOp.MAX
    for group in members:
        dist.all_reduce(total, op, group)
    norm = total
    if not is_max:
        norm = total ** (1 / norm_type)
    # 1e-6 as in torch, whose results it equals.
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for grads in by_copies.values():
        for grad in grads:
            grad.mul_(factor.to(grad.device))
    return norm


@torch.no_grad()
def any_rank_overflowed(parameters: Iterable[Tensor], groups: Sequence[Group] = (None,)) -> bool:
    """Return whether a gradient of any rank is infinite or NaN. A collective.

    If so, every rank's first gradient becomes infinite: a `torch.amp.GradScaler` then skips the
    step and lowers its scale on all ranks, not on one. Call it before `scaler.unscale_`.
    """
    parameters = list(parameters)
    flag = find_overflow(parameters)
    for group in groups:
        dist.all_reduce(flag, dist.ReduceOp.MAX, member_group(group))
    overflowed = bool(flag)
    if overflowed:
        mark_overflow([p.grad for p in parameters if p.grad is not None])
    return overflowed


def find_overflow(parameters: Iterable[Tensor]) -> Tensor:
    """Return 1 if a gradient of this rank is infinite or NaN, else 0, on the parameters' device."""
    parameters = list(parameters)
    device = next((p.device for p in parameters), torch.device("cpu"))
    flag = torch.zeros((), device=device)
    for p in parameters:
        if p.grad is not None:
            grad = _local(p.grad)
            values = grad.coalesce().values() if grad.is_sparse else grad
            flag = torch.maximum(flag, (~values.isfinite()).any().to(flag))
    return flag


def mark_overflow(grads: Sequence[Tensor]) -> None:
    """Make a gradient infinite, if there is one.

    A `GradScaler` looks at this rank's gradients only, and has no public way to be told.
    """
    if grads:
        grad = _local(grads[0])
        values = grad._values() if grad.is_sparse else grad
        values.fill_(float("inf"))


@contextmanager
def fork_seed(group: Group = None) -> Iterator[None]:
    """Draw other random numbers on each rank of `group` inside; afterwards go on as before.

    For dropout on what is cut, such as heads: ranks that have one seed would drop the same
    positions of different heads. Outside, they agree, as they must on what all have.

    The seed inside is drawn from torch's generator, so `torch.manual_seed` decides both, and a
    layer that `torch.utils.checkpoint` computes again draws the same numbers.
    """
    states = fork_generators(member_group(group))
    try:
        yield
    finally:
        restore_generators(states)


def fork_generators(group: dist.ProcessGroup) -> list[Tensor]:
    """Seed torch's generators as `fork_seed`; return their states for `restore_generators`.

    A model enters two blocks per layer, and `torch.random.fork_rng` takes 0.1 ms.
    """
    # On the CPU: reading a number from a GPU would wait for it.
    seed = int(torch.randint(2**31, (), device="cpu")) + group.rank()
    states = [torch.default_generator.get_state()]
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
        torch.cuda.manual_seed(seed)
    return states


def restore_generators(states: Sequence[Tensor]) -> None:
    """Go on with the random numbers from before `fork_generators`."""
    torch.default_generator.set_state(states[0])
    for gpu_state in states[1:]:
        torch.cuda.set_rng_state(gpu_state)


def _count_copies(parameter: Any, groups: Sequence[dist.ProcessGroup]) -> int:
    """Return how many ranks of the groups have this gradient."""
    copies = prod(find_layout(parameter, group).copies for group in groups)
    # FSDP has scalars whole on every rank
    mesh: Any = getattr(parameter, "device_mesh", None)
    ranks = [dist.get_process_group_ranks(group) for group in groups]
    for dim, placement in enumerate(parameter.placements if mesh is not None else ()):
        # torch may take another mesh, with groups of its own, if that has the same ranks
        if placement.is_replicate() and dist.get_process_group_ranks(mesh.get_group(dim)) in ranks:
            copies *= mesh.size(dim)
    return copies


def _local(grad: Any) -> Tensor:
    """Return this rank's part of a DTensor, and a gradient of a cut parameter as a plain tensor."""
    if hasattr(grad, "to_local"):
        return grad.to_local()
    return grad.as_subclass(Tensor) if isinstance(grad, CutGradient) else grad
