"""Cut tensors: this rank's part of a parameter or gradient, which must not be taken for the whole.

A norm in a step of SAM or LAMB, in a limit on weights, or of a gradient in a log would be that of
this rank's part, and every rank would go on with another. Functions whose results can be composed
are therefore collectives, and others are refused.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labkit.parallel.cut_functions import (
    GUARDED,
    LAYERS,
    MOVES,
    MOVING_PROPERTIES,
    call_on_all_parts,
    check_call,
    check_result,
    is_composed,
)
from labkit.torch_private import DisableTorchFunctionSubclass

# Results without a part's elements, those that somebody asks for as an ordinary tensor, and
# activations.
_NEW = {f"new_{name}" for name in ("empty", "zeros", "ones", "full", "tensor")}
_LIKE = {f"{name}_like" for name in ("empty", "zeros", "ones", "full", "rand", "randn")}
_ORDINARY = {*_NEW, *_LIKE, *LAYERS, "as_subclass"}


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


_DEVICE: Any = Tensor.device


class _Device:
    """The device of a part. No property: `torch.compile` would look into one without an end."""

    def __get__(self, part: Any, owner: Any = None) -> Any:
        with DisableTorchFunctionSubclass():
            return _DEVICE.__get__(part, owner)


class CutTensor(Tensor):
    """This rank's part of a cut tensor, whose shape and `numel()` are those of the part.

    Functions for which a part is not the whole are collectives, or refused (`cut_functions`).
    """

    group: dist.ProcessGroup
    cut_dim: int | None
    """The dimension in which it is cut; None if a function has moved it: no reduction is right."""
    is_factor = True
    """Whether it may be multiplied with an ordinary matrix, as in a model's forward pass."""
    result_class: type[Tensor]
    """Of what is computed from it, element by element."""
    ordinary = {*_ORDINARY, "detach", "clone"}
    """Functions of which results are ordinary tensors. State dicts have copies of parameters."""

    add_ = _without_dispatch(Tensor.add_)
    mul_ = _without_dispatch(Tensor.mul_)
    addcdiv_ = _without_dispatch(Tensor.addcdiv_)
    device = _Device()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        with DisableTorchFunctionSubclass():
            name = func.__name__
            # An optimizer calls some 15 functions per parameter: most must pass quickly.
            if name in GUARDED:
                if is_composed(func, args, options):
                    return call_on_all_parts(func, args, options)
                check_call(name, args, options)
            result = func(*args, **options)
            if isinstance(result, (Tensor, tuple, list)) and name not in cls.ordinary:
                _mark(func, result, args, options)
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        # States of optimizers are loaded where there are no ranks.
        with DisableTorchFunctionSubclass():
            return self.detach().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Any:
        with DisableTorchFunctionSubclass():
            return memo.setdefault(id(self), self.clone())


CutTensor.result_class = CutTensor


class CutGradient(CutTensor):
    """This rank's part of a gradient, or what is computed from it."""

    # The projection of a part, as GaLore and PowerSGD compute it, is not the whole's.
    is_factor = False
    # Many programs add up the squares of `p.grad.detach().data.norm(2)`.
    ordinary = _ORDINARY


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
            # A view of a vector of all gradients has lost where it is cut.
            is_moved = type(gradient) is CutGradient and gradient.cut_dim is None
            if type(gradient) is Tensor or is_moved:
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


def _mark(func: Any, result: Any, args: Sequence[Any], options: Mapping[str, Any]) -> None:
    """Make results parts, too, if they are computed from parts element by element."""
    if func.__name__ == "grad":  # torch.autograd.grad(outputs, inputs)
        _mark_gradients(result, args[1])
        return
    results = [result]
    if not isinstance(result, Tensor):
        # Pieces of a part; not results of lists, as of `torch._foreach_add`.
        results = result if args and isinstance(args[0], CutTensor) else []
    # Others were changed in place.
    new = [each for each in results if isinstance(each, Tensor) and not _is_marked(each)]
    if not new:
        return
    values = [*args, *options.values()]
    inputs = [each for each in values if isinstance(each, Tensor)]
    is_joined = not inputs  # by `cat` and `stack`
    if is_joined:
        inputs = [each for value in values if isinstance(value, list | tuple) for each in value]
    part = next(each for each in inputs if isinstance(each, CutTensor))
    # Else they are activations, such as those that a gain of this rank's features has scaled.
    if not is_joined and any(each.shape != part.shape and each.dim() for each in inputs):
        return
    is_moved = func.__name__ in MOVES or func in MOVING_PROPERTIES
    for each in new:
        check_result(func.__name__, each, part)
        if part.dim() and not each.dim():
            continue  # one element, which a program may print
        # Also an ordinary tensor that was changed in place, such as an average of gradients.
        each.__class__ = part.result_class
        is_cut_alike = each.shape == part.shape and not is_moved
        set_cut(each, part.group, part.cut_dim if is_cut_alike else None)


def _mark_gradients(gradients: Sequence[Any], inputs: Sequence[Tensor]) -> None:
    """Make gradients of parts parts, as in `grad`, for a penalty on them or a norm."""
    for gradient, part in zip(gradients, inputs, strict=True):
        if gradient is not None and isinstance(part, CutTensor):
            gradient.__class__ = CutGradient
            # Of a batch of gradients, the dimensions are others.
            is_alike = gradient.shape == part.shape
            set_cut(gradient, part.group, part.cut_dim if is_alike else None)


def _is_marked(tensor: Tensor) -> bool:
    return isinstance(tensor, CutTensor | nn.Parameter)
