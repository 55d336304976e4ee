"""Cut tensors: this rank's part of a parameter or gradient, which must not be taken for the whole.

A norm in a step of SAM or LAMB, in a limit on weights, or of a gradient in a log would be that of
this rank's part, and every rank would go on with another. Functions whose results can be composed
are therefore collectives, and others are refused.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labkit.parallel.agreement import wait_for_ranks
from labkit.torch_private import AMP_CHECK, FOREACH_NORM, DisableTorchFunctionSubclass

# Names of functions of torch. Of a part they are not what they are of the whole: reductions over
# the dimension that is cut, and over all, ...
_NORMS = {"norm", "linalg_norm", "linalg_vector_norm", "frobenius_norm", "renorm", "normalize"}
_SUMS = {"sum", "mean", "var", "std", "var_mean", "std_mean", "prod", "logsumexp", "softmax"}
_EXTREMES = {"max", "min", "amax", "amin", "any", "all", "aminmax", "argmax", "argmin"}
_ORDERS = {"median", "quantile", "kthvalue", "topk", "sort", "argsort", "cumsum", "histc", "mode"}
_REDUCTIONS = {*_NORMS, *_SUMS, *_EXTREMES, *_ORDERS}
# Those that give the whole's number from the ranks' numbers.
_COMPOSED = {"sum", "norm", "max", "min", "amax", "amin", "any", "all"}
# ... decompositions, and products of parts.
_DECOMPOSITIONS = {"linalg_svd", "svd", "linalg_svdvals", "linalg_qr", "qr", "linalg_eigh"}
_PRODUCTS = {"matmul", "__matmul__", "mm", "addmm", "bmm", "baddbmm", "mv", "dot", "vdot", "einsum"}
# the one function by which `GradScaler` reads gradients (torch 2.11 to 2.13), and that of clipping
_READ_BY_TORCH = {FOREACH_NORM.__name__, AMP_CHECK.__name__}
_GUARDED = {*_REDUCTIONS, *_DECOMPOSITIONS, *_PRODUCTS, *_READ_BY_TORCH}
# Results without its elements, and those that somebody asks for as an ordinary tensor.
_NEW = {f"new_{name}" for name in ("empty", "zeros", "ones", "full", "tensor")}
_LIKE = {f"{name}_like" for name in ("empty", "zeros", "ones", "full", "rand", "randn")}
# Activations: a layer of the model has computed them from its part.
_LAYERS = {"linear", "embedding", *_PRODUCTS}
_ORDINARY = {*_NEW, *_LIKE, *_LAYERS, "detach", "clone"}


def _without_dispatch(method: Any) -> Any:
    """Return a method without `__torch_function__`, which takes a microsecond.

    For those that optimizers call for each parameter. What changes a part element by element, in
    place, leaves it a part.
    """

    @functools.wraps(method)
    def call(*args: Any, **options: Any) -> Any:
        with DisableTorchFunctionSubclass():
            return method(*args, **options)

    return call


class CutTensor(Tensor):
    """This rank's part of a cut tensor. Functions for which it is not the whole are refused.

    Some functions are collectives instead, and give what they give of the whole: `norm()`, also in
    `torch.nn.utils.clip_grad_norm_`; `sum()`, also in a loss; `max()`, `min()`, `any()`, `all()`;
    and the overflow that `GradScaler` looks for.
    """

    group: dist.ProcessGroup
    cut_dim: int | None
    """The dimension in which it is cut; None if a function has moved it: no reduction is right."""
    is_factor = True
    """Whether it may be multiplied with an ordinary matrix, as in a model's forward pass."""
    result_class: type[Tensor]
    """Of what is computed from it, element by element."""

    add_ = _without_dispatch(Tensor.add_)
    mul_ = _without_dispatch(Tensor.mul_)
    addcdiv_ = _without_dispatch(Tensor.addcdiv_)
    device = property(_without_dispatch(Tensor.device.__get__))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        with DisableTorchFunctionSubclass():
            name = func.__name__
            # An optimizer calls some 15 functions per parameter: most must pass quickly.
            if name in _GUARDED:
                if func in _COLLECTIVES:
                    return _COLLECTIVES[func](func, args, options)
                if name in _COMPOSED and _is_of_all_elements(name, args, options):
                    return _of_all_parts(func, *args, **options)
                _check_call(name, args, options)
            result = func(*args, **options)
            is_new = isinstance(result, Tensor) and not isinstance(result, CutTensor)
            if is_new and name not in _ORDINARY:
                _mark(result, args, options)
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        # States of optimizers are loaded where there are no ranks.
        return self.detach().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Any:
        return memo.setdefault(id(self), self.clone())


CutTensor.result_class = CutTensor


class CutGradient(CutTensor):
    """This rank's part of a gradient, or what is computed from it."""

    # The projection of a part, as GaLore and PowerSGD compute it, is not the whole's.
    is_factor = False


CutGradient.result_class = CutGradient


class CutParameter(CutTensor, nn.Parameter):
    """This rank's part of a parameter. Its `grad` is a `CutGradient`, whoever has set it.

    Marking gradients after each backward pass would miss those that a data-parallel wrapper or a
    user puts in their place later.
    """

    @property
    def grad(self) -> Any:
        """The gradient of this rank's part."""
        with DisableTorchFunctionSubclass():
            gradient = _GRAD.__get__(self)
            if id(sys._getframe(1).f_code) in _ELEMENTWISE_READERS:
                # They get ordinary tensors. Else Python would see all of the twelve operators by
                # which AdamW updates a parameter, some 20 us for each parameter.
                return gradient.as_subclass(Tensor) if type(gradient) is CutGradient else gradient
            if type(gradient) is Tensor:
                gradient = gradient.as_subclass(CutGradient)
                set_cut(gradient, self.group, self.cut_dim)
                _GRAD.__set__(self, gradient)  # the same object the next time
        return gradient

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        with DisableTorchFunctionSubclass():
            _GRAD.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        with DisableTorchFunctionSubclass():
            _GRAD.__delete__(self)

    __reduce_ex__ = nn.Parameter.__reduce_ex__  # of its layouts, refused

    def __deepcopy__(self, memo: Any) -> Any:
        # Without layouts, as torch copies parameters without hooks and attributes.
        return memo.setdefault(id(self), nn.Parameter(self.detach().clone(), self.requires_grad))


_GRAD: Any = Tensor.grad
# Optimizers of torch that treat each element alone, and their methods that read gradients.
ELEMENTWISE: tuple[Any, ...] = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.ASGD,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.Rprop,
)
# By identity, since hashing a code object takes as long as all else that the getter does.
_ELEMENTWISE_READERS = {
    id(inspect.unwrap(torch.optim.Optimizer.zero_grad).__code__),
    *(id(optimizer._init_group.__code__) for optimizer in ELEMENTWISE),
}


def set_cut(tensor: Any, group: dist.ProcessGroup, dim: int | None) -> None:
    """Note on a `CutTensor` over which ranks, and in which dimension, it is cut."""
    tensor.group = group
    tensor.cut_dim = dim


def _check_call(name: str, args: Sequence[Any], options: Mapping[str, Any]) -> None:
    """Raise ValueError if a function of `_GUARDED` would take a part for the whole."""
    if name in _DECOMPOSITIONS:
        _refuse(name)
    if name in _PRODUCTS:
        factors = [each for each in args if isinstance(each, Tensor)]
        parts = [each for each in factors if isinstance(each, CutTensor)]
        # Parts with each other, or one that may be no factor.
        if len(parts) == len(factors) or not all(part.is_factor for part in parts):
            _refuse(name)
        return
    tensor = args[0] if args else options["input"]
    position = 2 if name in _NORMS else 1
    dims = options.get("dim", args[position] if len(args) > position else ())
    if isinstance(dims, Tensor):
        return  # the larger one of two, element by element
    if isinstance(dims, int):
        dims = (dims,)
    cut_dim = getattr(tensor, "cut_dim", None)
    if not dims or cut_dim is None or cut_dim in {dim % tensor.dim() for dim in dims}:
        _refuse(name)


def _refuse(name: str) -> NoReturn:
    raise ValueError(
        f"{name.removeprefix('linalg_')}() of a cut tensor would be that of this rank's part. Over"
        " all elements and under torch.no_grad(), norm(), sum(), max(), min(), any() and all() are"
        " those of all parts; detach() gives this rank's part"
    )


def _mark(result: Any, args: Sequence[Any], options: Mapping[str, Any]) -> None:
    """Make a result a part, too, if it is computed from parts element by element."""
    if isinstance(result, nn.Parameter):
        return  # in place
    values = [*args, *options.values()]
    inputs = [each for each in values if isinstance(each, Tensor)]
    is_joined = not inputs  # by `cat` and `stack`
    if is_joined:
        inputs = [each for value in values if isinstance(value, list | tuple) for each in value]
    part = next(each for each in inputs if isinstance(each, CutTensor))
    # Else they are activations, such as those that a gain of this rank's features has scaled.
    if is_joined or all(each.shape == part.shape or not each.dim() for each in inputs):
        # Also an ordinary tensor that was changed in place, such as an average of gradients.
        result.__class__ = part.result_class
        set_cut(result, part.group, part.cut_dim if result.shape == part.shape else None)


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
    return len(args) <= 2 and not given and order != "nuc"


def _of_all_parts(func: Any, part: Any, *args: Any, **options: Any) -> Tensor:
    """Return a number that a function gives of all parts. A collective."""
    number: Any = func(part, *args, **options)
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
    whole = func(torch.stack(numbers), *args, **options)
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
    if len(args) > 2 or {*options} - {"ord", "dtype"}:
        _check_call(func.__name__, args, options)
        return func(*args, **options)
    return _norm_of_parts(args[:1], [func(*args, **options)], *args[1:2], **options)[0]


def _find_overflow(func: Any, args: Sequence[Any], options: Mapping[str, Any]) -> None:
    """Tell all ranks of an overflow: args[1] is the flag, which is set in place."""
    func(*args, **options)
    for group in dict.fromkeys(each.group for each in args[0] if isinstance(each, CutTensor)):
        dist.all_reduce(args[1], dist.ReduceOp.MAX, group)


_COLLECTIVES: dict[Any, Callable[..., Any]] = {
    torch.linalg.vector_norm: _vector_norm,
    FOREACH_NORM: _total_norms,
    AMP_CHECK: _find_overflow,
}


def _norm_of_parts(
    grads: Sequence[Tensor], norms: Sequence[Tensor], ord: float = 2.0, **_: Any
) -> Sequence[Tensor]:
    """Turn the norms of cut gradients into those of all ranks' parts, with one message."""
    cut = [i for i, grad in enumerate(grads) if isinstance(grad, CutTensor)]
    results = list(norms)
    by_group: dict[dist.ProcessGroup, list[int]] = {}
    for i in cut:
        by_group.setdefault(grads[i].group, []).append(i)  # type: ignore[attr-defined]
    # One message for all gradients: one for each would take a latency per parameter.
    for group, numbers in by_group.items():
        # FSDP's norms are DTensors: first those of all its ranks' rows, then of the parts
        local = [getattr(norms[i], "full_tensor", lambda i=i: norms[i])() for i in numbers]
        whole = torch.stack(local)
        if ord == float("inf"):
            dist.all_reduce(whole, dist.ReduceOp.MAX, group)
        else:
            whole.pow_(ord)
            dist.all_reduce(whole, dist.ReduceOp.SUM, group)
            whole.pow_(1 / ord)
        for i, norm in zip(numbers, whole, strict=True):
            results[i] = _replicate_like(norms[i], norm)
    return results


def _replicate_like(like: Any, norm: Tensor) -> Tensor:
    """Return a norm as the DTensor that `like` is, if it is one."""
    if not hasattr(like, "full_tensor"):
        return norm
    from torch.distributed.tensor import DTensor, Replicate  # takes half a second

    mesh = like.device_mesh
    return DTensor.from_local(norm, mesh, [Replicate()] * mesh.ndim, run_check=False)
