"""Gradients of a model that several ranks train together: clipping, overflow, random numbers.

    model = tensor_parallel(model, group)             or a Pipeline: each rank has its parameters
    loss.backward()
    any_rank_overflowed(model.parameters(), [group])  float16: before scaler.unscale_ or scaler.step
    norm = clip_grad_norm_(model.parameters(), 1.0, [group])
    optimizer.step()

A parameter says in its attribute `layouts` how the ranks of a group have it: cut, or on several of
them. A parameter without a layout for a group is only on this rank, as a layer of a pipeline is.

Cutting a model by torch's DTensor was measured: autograd through `to_local()` makes a small step
1.4 to 1.5 times as long, and AdamW 1.6 to 1.9 times. Parameters of labkit's wrappers are therefore
ordinary tensors with layouts. For `torch.nn.utils.clip_grad_norm_` and `GradScaler`, the gradient
of a `CutParameter` is a `CutGradient`; state dicts have DTensors (`labkit.parallel.tensor`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labkit.parallel.transport import member_group
from labkit.torch_private import AMP_CHECK, FOREACH_NORM, DisableTorchFunctionSubclass

Group = dist.ProcessGroup | None


@dataclass(frozen=True)
class Layout:
    """How the ranks of a group have a parameter."""

    group: dist.ProcessGroup
    dim: int | None = None
    """The dimension in which it is cut; None: some ranks have all of it."""
    copies: int = 1
    """Ranks that have the same values and, after the backward pass, the same gradient."""
    shape: Sequence[int] = ()
    """Of the whole parameter, if it is cut."""

    def __deepcopy__(self, memo: object) -> Layout:
        return self  # a process group cannot be copied

    def __reduce__(self) -> NoReturn:
        raise ValueError("expected tensors without a process group: save a state_dict")


def add_layout(parameter: Tensor, layout: Layout) -> None:
    """Mark how a group has the parameter; replaces an earlier layout for this group."""
    others = [each for each in get_layouts(parameter) if each.group is not layout.group]
    parameter.layouts = (*others, layout)  # type: ignore[attr-defined]
    # FSDP's shards have gradients of a class that does the same
    if layout.dim is not None and not hasattr(parameter, "to_local"):
        parameter.__class__ = CutParameter


def find_cut(parameter: Tensor) -> Layout | None:
    """Return the layout of the group over which a parameter is cut, if it is."""
    return next((each for each in get_layouts(parameter) if each.dim is not None), None)


def get_layouts(parameter: Tensor) -> tuple[Layout, ...]:
    """Return the layouts of a parameter, at most one per group."""
    return getattr(parameter, "layouts", ())


def find_layout(parameter: Tensor, group: dist.ProcessGroup) -> Layout:
    """Return the layout of a parameter for a group; without one, it is on this rank alone."""
    layouts = (each for each in get_layouts(parameter) if each.group is group)
    return next(layouts, Layout(group))


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
        # all copies are added below
        total = torch.maximum(total, norm) if is_max else total + norm**norm_type / copies
    for group in members:
        dist.all_reduce(total, dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM, group)
    norm = total if is_max else total ** (1 / norm_type)
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
    # On the CPU: reading a number from a GPU would wait for it.
    seed = int(torch.randint(2**31, (), device="cpu")) + member_group(group).rank()
    # As `torch.random.fork_rng` and `torch.manual_seed` do, which take 0.1 ms: a model enters two
    # blocks per layer.
    state = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)
    has_gpu = torch.cuda.is_initialized()
    if has_gpu:
        gpu_state = torch.cuda.get_rng_state()
        torch.cuda.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(state)
        if has_gpu:
            torch.cuda.set_rng_state(gpu_state)


class CutGradient(Tensor):
    """This rank's part of a gradient: an ordinary tensor, but for two functions of torch.

    The norm in `torch.nn.utils.clip_grad_norm_` is that of all ranks' parts, and an overflow that
    `GradScaler` finds in any part is found on all ranks. Both are collectives.
    """

    group: dist.ProcessGroup

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        with DisableTorchFunctionSubclass():
            # Before all else: the functions below correct what torch has computed of this rank's
            # part.
            result = func(*args, **options)
            if func not in _READ_BY_TRAINERS:
                return result  # first, since optimizers call some operators per gradient
            if func is FOREACH_NORM:
                return _norm_of_parts(args[0], result, *args[1:2], **options)
            if func is torch.linalg.vector_norm:
                if isinstance(args[0], cls) and not {*options} - {"ord", "dtype"}:
                    return _norm_of_parts([args[0]], [result], *args[1:2], **options)[0]
                return result
            # `GradScaler`: args[1] is the flag of an overflow, which has been set in place
            for group in dict.fromkeys(each.group for each in args[0] if isinstance(each, cls)):
                dist.all_reduce(args[1], dist.ReduceOp.MAX, group)
            return result


_READ_BY_TRAINERS = {
    torch.linalg.vector_norm,
    FOREACH_NORM,
    # the one function by which `GradScaler` reads gradients (torch 2.11 to 2.13)
    AMP_CHECK,
}


class CutParameter(nn.Parameter):
    """This rank's part of a parameter. Its `grad` is a `CutGradient`, whoever has set it.

    Marking gradients after each backward pass would miss those that a data-parallel wrapper or a
    user puts in their place later.
    """

    @property
    def grad(self) -> Any:
        """The gradient of this rank's part."""
        gradient = _GRAD.__get__(self)
        if type(gradient) is Tensor:
            gradient = gradient.as_subclass(CutGradient)
            gradient.group = cast(Layout, find_cut(self)).group
            _GRAD.__set__(self, gradient)  # the same object the next time, as of any parameter
        return gradient

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        _GRAD.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        _GRAD.__delete__(self)


_GRAD: Any = Tensor.grad


def _norm_of_parts(
    grads: Sequence[Tensor], norms: Sequence[Tensor], ord: float = 2.0, **_: Any
) -> Sequence[Tensor]:
    """Turn the norms of cut gradients into those of all ranks' parts, with one message."""
    cut = [i for i, grad in enumerate(grads) if isinstance(grad, CutGradient)]
    is_max = ord == float("inf")
    # FSDP's norms are DTensors: first those of all its ranks' rows, then of the parts
    local = [getattr(norms[i], "full_tensor", lambda i=i: norms[i])() for i in cut]
    # One message for all gradients: one for each would take a latency per parameter.
    powers = torch.stack([norm if is_max else norm**ord for norm in local])
    group = grads[cut[0]].group  # type: ignore[attr-defined]
    dist.all_reduce(powers, dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM, group)
    whole = powers if is_max else powers ** (1 / ord)
    results = list(norms)
    for i, norm in zip(cut, whole, strict=True):
        results[i] = _replicate_like(norms[i], norm)
    return results


def _replicate_like(like: Any, norm: Tensor) -> Tensor:
    """Return a norm as the DTensor that `like` is, if it is one."""
    if not hasattr(like, "full_tensor"):
        return norm
    from torch.distributed.tensor import DTensor, Replicate  # takes half a second

    mesh = like.device_mesh
    return DTensor.from_local(norm, mesh, [Replicate()] * mesh.ndim, run_check=False)


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
