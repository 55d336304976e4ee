"""Functions of torch on a cut tensor that would take this rank's part for the whole.

Results that can be composed from the parts' are those of all parts, by a collective: `norm()`, also
in `torch.nn.utils.clip_grad_norm_`; `sum()`, also in a loss; `max()`, `min()`, `any()`, `all()`;
and the overflow that `GradScaler` looks for. All others are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from labkit.parallel.agreement import wait_for_ranks
from labkit.torch_private import AMP_CHECK, FOREACH_NORM

# Names of functions of torch. Over all elements, and over the dimension that is cut, they are not
# for a part what they are for the whole.
_NORMS = {"norm", "linalg_norm", "linalg_vector_norm", "frobenius_norm", "normalize"}
_SUMS = {"sum", "mean", "var", "std", "var_mean", "std_mean", "prod", "nansum", "nanmean"}
_EXPONENTIALS = {"logsumexp", "softmax", "log_softmax", "softmin", "logcumsumexp"}
_COUNTS = {"count_nonzero"}
_EXTREMES = {"max", "min", "amax", "amin", "any", "all", "aminmax", "argmax", "argmin"}
_ORDERS = {"median", "quantile", "kthvalue", "topk", "sort", "argsort", "histc", "mode"}
_CUMULATIVE = {"cumsum", "cumsum_", "cumprod", "cumprod_", "cummax", "cummin"}
_DISTANCES = {"cosine_similarity", "pairwise_distance", "cdist"}
_REDUCTIONS = {*_NORMS, *_SUMS, *_EXPONENTIALS, *_COUNTS, *_EXTREMES, *_ORDERS, *_CUMULATIVE}
# Those that give the whole's number from the ranks' numbers.
_COMPOSED = {"sum", "count_nonzero", "norm", "max", "min", "amax", "amin", "any", "all"}
# Norms of each slice of one dimension, which is what they are called with.
_LIMITS = {"renorm", "renorm_", "_weight_norm", "norm_except_dim"}
_DECOMPOSITIONS = {"linalg_svd", "svd", "linalg_svdvals", "linalg_qr", "qr", "linalg_eigh"}
_TURNS_IN_PLACE = {"t_", "transpose_", "swapaxes_", "swapdims_"}
_MATMULS = {"matmul", "__matmul__", "__rmatmul__", "mm", "addmm", "bmm", "baddbmm", "mv", "addmv"}
_PRODUCTS = {*_MATMULS, "dot", "vdot", "inner", "einsum", "tensordot", "linalg_multi_dot"}
# The functions by which `clip_grad_norm_` and `GradScaler` read gradients.
_READ_BY_TORCH = {FOREACH_NORM.__name__, AMP_CHECK.__name__}
GUARDED = {*_REDUCTIONS, *_DISTANCES, *_LIMITS, *_DECOMPOSITIONS, *_TURNS_IN_PLACE, *_PRODUCTS}
GUARDED |= _READ_BY_TORCH
# Of these the dimension that is cut is another one, also where the shape stays.
MOVES = {"t", "transpose", "swapaxes", "swapdims", "permute", "movedim", "moveaxis", "adjoint"}
_tensor: Any = Tensor  # its attributes are not in its types
MOVING_PROPERTIES = {getattr(_tensor, name).__get__ for name in ("T", "mT", "H", "mH")}
# One element, or an operation on it.
_ELEMENTS = {"__getitem__", "select", "squeeze", "unbind"}
# Activations: a layer of the model has computed them from its part.
LAYERS = {"linear", "embedding", *_PRODUCTS}


def is_part(value: Any) -> bool:
    """Return whether a value is a `CutTensor`, which says in which dimension it is cut."""
    return hasattr(value, "cut_dim")


def check_result(name: str, result: Tensor, part: Tensor) -> None:
    """Raise ValueError for a number of all elements, as of `torch.dist` or of a loss function."""
    if part.dim() and not result.dim() and name not in _ELEMENTS:
        _refuse(name)


def check_call(name: str, args: Sequence[Any], options: Mapping[str, Any]) -> None:
    """Raise ValueError if a function of `GUARDED` would take a part for the whole."""
    if name in _DECOMPOSITIONS or name in _TURNS_IN_PLACE:
        _refuse(name)
    if name in _PRODUCTS:
        factors: list[Any] = [each for each in args if isinstance(each, Tensor)]
        parts = [each for each in factors if is_part(each)]
        # Parts with each other, or one that may be no factor.
        if len(parts) == len(factors) or not all(part.is_factor for part in parts):
            _refuse(name)
        return
    tensor = args[0] if args else options["input"]
    cut_dim = getattr(tensor, "cut_dim", None)
    if name in _LIMITS:
        kept = options.get("dim", args[2] if len(args) > 2 else None)
        if cut_dim is None or kept is None or kept % tensor.dim() != cut_dim:
            _refuse(name)
        return
    position = 2 if name in _NORMS or name in _DISTANCES else 1
    dims = options.get("dim", args[position] if len(args) > position else ())
    if isinstance(dims, Tensor):
        return  # the larger one of two, element by element
    if isinstance(dims, int):
        dims = (dims,)
    if not dims or cut_dim is None or cut_dim in {dim % tensor.dim() for dim in dims}:
        _refuse(name)


def _refuse(name: str) -> NoReturn:
    raise ValueError(
        f"{name.removeprefix('linalg_')}() of a cut tensor would be that of this rank's part. Over"
        " all elements and under torch.no_grad(), norm(), sum(), max(), min(), any() and all() are"
        " those of all parts; as_subclass(torch.Tensor) gives this rank's part"
    )


def is_composed(func: Any, args: Sequence[Any], options: Mapping[str, Any]) -> bool:
    """Return whether the result of a function of `GUARDED` is to be that of all parts."""
    if func in _COLLECTIVES:
        return True
    return func.__name__ in _COMPOSED and _is_of_all_elements(func.__name__, args, options)


def call_on_all_parts(func: Any, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Return what a function gives of all parts (`is_composed`). A collective."""
    collective = _COLLECTIVES.get(func, _reduce_all_parts)
    return collective(func, args, options)


def _is_of_all_elements(name: str, args: Sequence[Any], options: Mapping[str, Any]) -> bool:
    """Whether a function of `_COMPOSED` reduces a part, not moved or joined, to one number."""
    # By a keyword, as in `torch.sum(input=p)`, it is refused.
    if not args or getattr(args[0], "cut_dim", None) is None:
        return False
    # `Tensor.norm` passes all of its defaults.
    given = {
        key: value for key, value in options.items() if value is not None and value is not False
    }
    if name != "norm":
        return len(args) == 1 and not given
    order = given.pop("p", args[1] if len(args) > 1 else "fro")
    return len(args) <= 2 and not given and order not in ("nuc", 0)


def _reduce_all_parts(func: Any, args: Sequence[Any], options: Mapping[str, Any]) -> Tensor:
    """Return the one number that a function of `_COMPOSED` gives of all parts."""
    part: Any = args[0]
    number: Any = func(*args, **options)
    if hasattr(number, "full_tensor"):  # of FSDP's shards: first over its ranks
        number = number.full_tensor()
    if number.requires_grad:
        if func.__name__ != "sum":
            _refuse(func.__name__)  # it would have no gradient
        whole: Tensor = _SumOfParts.apply(number, part.group)
        return whole
    # A program may log it on rank 0 alone.
    wait_for_ranks(f"{func.__name__}() of a cut tensor", part.group)
    numbers = [torch.empty_like(number) for _ in range(part.group.size())]
    dist.all_gather(numbers, number, part.group)
    if func.__name__ in _COUNTS:
        return torch.stack(numbers).sum()
    whole = func(torch.stack(numbers), *args[1:], **options)
    return whole


class _SumOfParts(torch.autograd.Function):
    """A number of all ranks' parts, such as a penalty on weights in the loss of each rank."""

    @staticmethod
    def forward(ctx: Any, number: Tensor, group: dist.ProcessGroup) -> Tensor:
        whole = number.detach().clone()
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        # Each rank's loss has the whole number, and each rank the gradient of its own part.
        return gradient, None


def _total_norms(func: Any, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
    return _norm_of_parts(args[0], func(*args, **options), *args[1:2], **options)


def _vector_norm(func: Any, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
    order = options.get("ord", args[1] if len(args) > 1 else 2)
    if len(args) > 2 or {*options} - {"ord", "dtype"} or order == 0:
        check_call(func.__name__, args, options)
        return func(*args, **options)
    return _norm_of_parts(args[:1], [func(*args, **options)], *args[1:2], **options)[0]


def _find_overflow(func: Any, args: Sequence[Any], options: Mapping[str, Any]) -> None:
    """Tell all ranks of an overflow: args[1] is the flag, which is set in place."""
    func(*args, **options)
    for group in dict.fromkeys(each.group for each in args[0] if is_part(each)):
        dist.all_reduce(args[1], dist.ReduceOp.MAX, group)


_COLLECTIVES: dict[Any, Callable[..., Any]] = {
    torch.linalg.vector_norm: _vector_norm,
    FOREACH_NORM: _total_norms,
    AMP_CHECK: _find_overflow,
}


_EXTREME_NORMS = {float("inf"): dist.ReduceOp.MAX, -float("inf"): dist.ReduceOp.MIN}


def _norm_of_parts(
    grads: Sequence[Tensor], norms: Sequence[Tensor], ord: float = 2.0, **_: Any
) -> Sequence[Tensor]:
    """Turn the norms of cut gradients into those of all ranks' parts, with one message."""
    cut = [i for i, grad in enumerate(grads) if is_part(grad)]
    results = list(norms)
    by_group: dict[dist.ProcessGroup, list[int]] = {}
    for i in cut:
        by_group.setdefault(grads[i].group, []).append(i)  # type: ignore[attr-defined]
    # One message for all gradients: one for each would take a latency per parameter.
    for group, numbers in by_group.items():
        # FSDP's norms are DTensors: first those of all its ranks' rows, then of the parts
        local = [getattr(norms[i], "full_tensor", lambda i=i: norms[i])() for i in numbers]
        # The square of a norm of float16 gradients may be infinite.
        whole = torch.stack(local).double()
        if ord in _EXTREME_NORMS:
            dist.all_reduce(whole, _EXTREME_NORMS[ord], group)
        else:
            whole.pow_(ord)
            dist.all_reduce(whole, dist.ReduceOp.SUM, group)
            whole.pow_(1 / ord)
        for i, norm in zip(numbers, whole, strict=True):
            results[i] = _replicate_like(norms[i], norm.to(norms[i].dtype))
    return results


def _replicate_like(like: Any, norm: Tensor) -> Tensor:
    """Return a norm as the DTensor that `like` is, if it is one."""
    if not hasattr(like, "full_tensor"):
        return norm
    from torch.distributed.tensor import DTensor, Replicate  # takes half a second

    mesh = like.device_mesh
    return DTensor.from_local(norm, mesh, [Replicate()] * mesh.ndim, run_check=False)
