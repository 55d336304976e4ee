"""Functions of torch on a cut tensor, of which most would take this rank's part for the whole.

Functions that compute each element alone, move elements, or are layers of a model are called as
they are, and so are reductions over dimensions that are not cut. Some others give the result of all
parts, by a collective: `norm()`, also in `torch.nn.utils.clip_grad_norm_`; `sum()`, also in a loss;
`max()`, `min()`, `any()`, `all()`; and the overflow that `GradScaler` looks for. All others are
refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from labkit.parallel.agreement import wait_for_ranks
from labkit.torch_private import AMP_CHECK, FOREACH_NORM

# Names of functions of torch. Over all elements, and over the dimension that is cut, they are not
# for a part what they are for the whole.
_NORMS = {"norm", "linalg_norm", "linalg_vector_norm", "frobenius_norm", "normalize"}
_SUMS = {"sum", "mean", "var", "std", "var_mean", "std_mean", "prod", "nansum", "nanmean"}
_EXPONENTIALS = {"logsumexp", "softmax", "log_softmax", "softmin", "logcumsumexp"}
_COUNTS = {"count_nonzero"}
_EXTREMES = {"max", "min", "amax", "amin", "any", "all", "aminmax", "argmax", "argmin"}
_ORDERS = {"median", "sort", "argsort", "mode"}
_SELECTIONS = {"quantile", "kthvalue", "topk"}
_CUMULATIVE = {"cumsum", "cumsum_", "cumprod", "cumprod_", "cummax", "cummin"}
_REDUCTIONS = {*_NORMS, *_SUMS, *_EXPONENTIALS, *_COUNTS, *_EXTREMES, *_ORDERS, *_SELECTIONS}
_REDUCTIONS |= _CUMULATIVE
# Those that give the whole's number from the ranks' numbers.
_COMPOSED = {"sum", "count_nonzero", "norm", "max", "min", "amax", "amin", "any", "all"}
# They take the norm of each slice of one dimension, `dim`.
_SLICE_NORMS = {"renorm", "renorm_", "_weight_norm", "norm_except_dim"}
_MATMULS = {"matmul", "__matmul__", "__rmatmul__", "mm", "addmm", "bmm", "baddbmm"}
_PRODUCTS = {*_MATMULS, "linear", "dot", "vdot", "inner", "outer", "einsum", "tensordot"}
_PRODUCTS |= {"linalg_multi_dot", "linalg_matmul", "scaled_dot_product_attention"}
# Layers that have a part as a weight.
_CONVOLUTIONS = {f"conv{kind}{n}d" for kind in ("", "_transpose") for n in (1, 2, 3)}
_NORMALIZATIONS = {f"{kind}_norm" for kind in ("layer", "rms", "group", "batch", "instance")}
_WEIGHTED = {*_CONVOLUTIONS, *_NORMALIZATIONS, "embedding", "embedding_bag", "bilinear", "prelu"}
# Their results are activations: a layer of the model has computed them from its part.
LAYERS = {*_PRODUCTS, *_WEIGHTED}
# The functions by which `clip_grad_norm_` and `GradScaler` read gradients.
_READ_BY_TORCH = {FOREACH_NORM.__name__, AMP_CHECK.__name__}
GUARDED = {*_REDUCTIONS, *_SLICE_NORMS, *LAYERS, *_READ_BY_TORCH}
# Of these the dimension that is cut is another one, also where the shape stays.
MOVES = {"t", "transpose", "swapaxes", "swapdims", "permute", "movedim", "moveaxis", "adjoint"}
MOVES |= {"as_strided"}
_tensor: Any = Tensor  # its attributes are not in its types
MOVING_PROPERTIES = {getattr(_tensor, name).__get__ for name in ("T", "mT", "H", "mH")}
_VIEWS = {"view", "view_as", "reshape", "reshape_as", "flatten", "unflatten", "ravel"}
_VIEWS |= {"squeeze", "unsqueeze", "expand", "expand_as", "broadcast_to", "contiguous"}
_VIEWS |= {"view_as_real", "view_as_complex", "resolve_conj", "resolve_neg"}
_PIECES = {"unbind", "chunk", "split", "split_with_sizes", "tensor_split", "narrow", "select"}
_PIECES |= {"unsafe_chunk", "unsafe_split", "index_select", "masked_select", "__getitem__"}
_JOINS = {"cat", "concat", "stack", "hstack", "vstack", "flatten_dense_tensors"}
_CASTS = {"to", "type", "type_as", "float", "double", "half", "bfloat16", "int", "long", "bool"}
_CASTS |= {"cpu", "cuda", "pin_memory", "to_dense"}
_REPETITIONS = {"repeat", "repeat_interleave", "tile"}
# Without tensors in their results, as others (`call_unknown`), and asked in every step.
_QUERIES = {"is_complex", "is_floating_point", "dim", "size", "numel", "stride", "item", "__len__"}
REARRANGED = {*MOVES, *_VIEWS, *_PIECES, *_JOINS, *_CASTS, *_REPETITIONS, *_QUERIES}
REARRANGED |= {"__get__", "grad"}
# Element by element, and without torch's tag for it: other names, values that do not depend on
# others, the layers that torch composes, and fused optimizers.
_UNTAGGED = {"absolute", "subtract", "multiply", "divide", "negative", "floor_divide", "floordiv"}
_UNTAGGED |= {"greater", "greater_equal", "less", "less_equal", "not_equal"}
_UNTAGGED |= {"and", "or", "xor", "invert", "isclose", "isreal", "true_divide", "fix", "conj"}
_UNTAGGED |= {"requires_grad", "detach"}
_UNTAGGED |= {"fill", "zero", "copy", "share_memory", "constant", "uniform", "normal", "bernoulli"}
_UNTAGGED |= {"random", "exponential", "trunc_normal", "dropout", "softsign", "tanhshrink"}
_UNTAGGED |= {"log_sigmoid", "hardsigmoid", "hardswish", "_threshold", "poisson", "complex"}
_UNTAGGED |= {f"fake_quantize_per_{each}_affine" for each in ("tensor", "channel")}
_UNTAGGED |= {f"_fused_{each}" for each in ("sgd", "adam", "adamw", "adagrad")}


def _is_tagged(name: str) -> bool:
    """Return whether torch says of an operator that it computes each element for itself."""
    packet: Any = getattr(torch.ops.aten, name, None)
    overloads = packet.overloads() if hasattr(packet, "overloads") else []
    return any(torch.Tag.pointwise in getattr(packet, each).tags for each in overloads)


# All of them at import (a tenth of a second), since the compiler looks into what a part asks for
# each function. The larger one of two has the name of the largest of all, which is a reduction.
_NAMES = {name.strip("_") for each in (torch, Tensor, functional) for name in dir(each)}
_OPERATORS = {name for name in _NAMES - {"", *_REDUCTIONS} if _is_tagged(name)} | _UNTAGGED
_FORMS = ("{}", "{}_", "__{}__", "__r{}__", "__i{}__", "_foreach_{}", "_foreach_{}_")
ELEMENTWISE = {form.format(name) for name in _OPERATORS for form in _FORMS}


def call_unknown(func: Any, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Call a function whose result has no tensors, such as `tolist`. ValueError for all others."""
    name = func.__name__
    if name.endswith("_") and not name.endswith("__"):
        _refuse(name)  # before it changes the part
    result = func(*args, **options)
    results = result if isinstance(result, tuple | list) else [result]
    if any(isinstance(each, Tensor) for each in results):
        _refuse(name)
    return result


def is_part(value: Any) -> bool:
    """Return whether a value is a `CutTensor`, which says in which dimension it is cut."""
    return hasattr(value, "cut_dim")


def check_call(name: str, args: Sequence[Any], options: Mapping[str, Any]) -> None:
    """Raise ValueError if a function of `GUARDED` would take a part for the whole."""
    if name in _PRODUCTS:
        _check_product(name, args)
        return
    tensor = args[0] if args else options["input"]
    cut_dim = getattr(tensor, "cut_dim", None)
    if name in _WEIGHTED:
        if is_part(tensor):
            _refuse(name)
        return
    if name in _SLICE_NORMS:
        kept = options.get("dim", args[2] if len(args) > 2 else None)
        if cut_dim is None or kept is None or kept % tensor.dim() != cut_dim:
            _refuse(name)
        return
    position = 2 if name in _NORMS or name in _SELECTIONS else 1
    dims = options.get("dim", args[position] if len(args) > position else ())
    if isinstance(dims, Tensor):  # the larger one of two, element by element
        if not is_part(tensor):
            _refuse(name)  # use torch.maximum, whose result is known as a part
        return
    if isinstance(dims, int):
        dims = (dims,)
    if not dims or cut_dim is None or cut_dim in {dim % tensor.dim() for dim in dims}:
        _refuse(name)


def _check_product(name: str, factors: Sequence[Any]) -> None:
    tensors: list[Any] = [each for each in factors if isinstance(each, Tensor)]
    parts = [each for each in tensors if is_part(each)]
    # Parts with each other, or one that may be no factor.
    if len(parts) == len(tensors) or not all(part.is_factor for part in parts):
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
    """Return whether a function of `_COMPOSED` makes one number of a part, not moved or joined."""
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
    numbers = [torch.empty_like(number) for _ in range(part.group.size())]
    arrival = dist.all_gather(numbers, number, part.group, async_op=True)
    # A program may log it on rank 0 alone.
    wait_for_ranks(f"{func.__name__}() of a cut tensor", part.group, arrival)
    if func.__name__ in _COUNTS:
        return torch.stack(numbers).sum()
    whole = func(torch.stack(numbers), *args[1:], **options)
    return whole


# Relative to the largest gradient: ranks with the same loss compute it in the same order, so that
# only rounding may differ.
_MAX_DIFFERENCE = 0.01


class _SumOfParts(torch.autograd.Function):
    """A number of all ranks' parts, such as a penalty on weights in the loss of each rank.

    Each rank's loss has the whole number, and each rank the gradient of its part. In a forward pass
    by parts, as of a weight that is divided by its norm, ranks would have to add up what each has
    done with the number. That case is detected: the gradients of the number then differ.
    """

    @staticmethod
    def forward(ctx: Any, number: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        whole = number.detach().clone()
        _all_reduce(whole, dist.ReduceOp.SUM, group, "sum()")
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        bounds = torch.stack([gradient.detach(), -gradient.detach()])
        _all_reduce(bounds, dist.ReduceOp.MAX, ctx.group, "the gradient of sum()")
        # On a GPU this waits for the device: only a loss with such a penalty pays for it.
        if bounds.sum() > _MAX_DIFFERENCE * bounds.abs().amax():
            raise ValueError(
                "expected the sum of a cut tensor in a loss that is alike on all ranks; what each"
                " computes from its part, as a weight divided by its norm, gets a wrong gradient"
            )
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
        _all_reduce(args[1], dist.ReduceOp.MAX, group, "unscale_()")


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
        if whole.requires_grad:
            _refuse("norm")  # it would have the gradient of this rank's part alone
        if ord in _EXTREME_NORMS:
            _all_reduce(whole, _EXTREME_NORMS[ord], group, "norm()")
        else:
            whole.pow_(ord)
            _all_reduce(whole, dist.ReduceOp.SUM, group, "norm()")
            whole.pow_(1 / ord)
        for i, norm in zip(numbers, whole, strict=True):
            results[i] = _replicate_like(norms[i], norm.to(norms[i].dtype))
    return results


def _all_reduce(numbers: Tensor, op: Any, group: dist.ProcessGroup, call: str) -> None:
    """All-reduce in place, and say so if this rank is alone. On a GPU nothing waits here."""
    arrival = dist.all_reduce(numbers, op, group, async_op=True)
    if numbers.is_cuda:
        arrival.wait()
    else:
        wait_for_ranks(f"{call} of a cut tensor", group, arrival)


def _replicate_like(like: Any, norm: Tensor) -> Tensor:
    """Return a norm as the DTensor that `like` is, if it is one."""
    if not hasattr(like, "full_tensor"):
        return norm
    from torch.distributed.tensor import DTensor, Replicate  # takes half a second

    mesh = like.device_mesh
    return DTensor.from_local(norm, mesh, [Replicate()] * mesh.ndim, run_check=False)
