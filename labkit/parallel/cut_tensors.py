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
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labkit.parallel.cut_functions import (
    ELEMENTWISE,
    GUARDED,
    LAYERS,
    MOVES,
    MOVING_PROPERTIES,
    REARRANGED,
    call_on_all_parts,
    call_unknown,
    check_call,
    is_composed,
)
from labkit.torch_private import DisableTorchFunctionSubclass

# Results without a part's elements, those that somebody asks for as an ordinary tensor, and
# activations.
_NEW = {f"new_{name}" for name in ("empty", "zeros", "ones", "full", "tensor")}
_LIKE = {f"{name}_like" for name in ("empty", "zeros", "ones", "full", "rand", "randn", "randint")}
_ORDINARY = {*_NEW, *_LIKE, *LAYERS, "as_subclass"}
_KNOWN = {*_ORDINARY, *REARRANGED, *ELEMENTWISE}


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
    """The device of a part. No property, which `torch.compile` would trace without an end."""

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
            elif name not in _KNOWN:
                return call_unknown(func, args, options)
            result = func(*args, **options)
            # A part was changed in place, and a size has no elements.
            is_done = isinstance(result, (CutTensor, torch.Size)) or name in cls.ordinary
            if not is_done and isinstance(result, (Tensor, tuple, list)):
                _mark(func, result, args, options)
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        # States of optimizers are loaded where there are no ranks.
        with DisableTorchFunctionSubclass():
            return self.detach().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Any:
        # Without layouts, as torch copies parameters without hooks and attributes.
        with DisableTorchFunctionSubclass():
            copy = self.detach().clone()
            if isinstance(self, nn.Parameter):  # also one that a program makes of a gradient
                copy = nn.Parameter(copy, self.requires_grad)
            return memo.setdefault(id(self), copy)


class CutGradient(CutTensor):
    """This rank's part of a gradient, or what is computed from it."""

    # The projection of a part, as GaLore and PowerSGD compute it, is not the whole's.
    is_factor = False
    # Many programs add up the squares of `p.grad.detach().data.norm(2)`.
    ordinary = _ORDINARY


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
                # which AdamW updates a parameter, some 20 us for each parameter. One with a graph
                # has to be detached in place, which another tensor cannot.
                is_part = type(gradient) is CutGradient and not gradient.requires_grad
                return gradient.as_subclass(Tensor) if is_part else gradient
            # A view of a vector of all gradients has lost where it is cut.
            is_moved = type(gradient) is CutGradient and gradient.cut_dim is None
            if type(gradient) is Tensor or is_moved:
                gradient.__class__ = CutGradient
                set_cut(gradient, self.group, self.cut_dim)
        return gradient

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        with DisableTorchFunctionSubclass():
            _GRAD.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        with DisableTorchFunctionSubclass():
            _GRAD.__delete__(self)

    def register_hook(self, hook: Callable[[Any], Any]) -> Any:
        """Register a hook, which gets the gradient as a `CutGradient`, as readers of `grad` do."""
        group = self.group
        cut_dim = self.cut_dim

        def call(gradient: Any) -> Any:
            if type(gradient) is Tensor:
                gradient.__class__ = CutGradient
                set_cut(gradient, group, cut_dim)
            return hook(gradient)

        with DisableTorchFunctionSubclass():
            return super().register_hook(call)

    __reduce_ex__ = nn.Parameter.__reduce_ex__  # of its layouts, refused


_GRAD: Any = Tensor.grad
# Optimizers of torch that treat each element alone, and their methods that read gradients.
ELEMENTWISE_OPTIMIZERS: tuple[Any, ...] = (
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
    *(id(optimizer._init_group.__code__) for optimizer in ELEMENTWISE_OPTIMIZERS),
}


def set_cut(tensor: Any, group: dist.ProcessGroup, dim: int | None) -> None:
    """Note on a `CutTensor` over which ranks, and in which dimension, it is cut."""
    tensor.group = group
    tensor.cut_dim = dim


def _mark(func: Any, result: Any, args: Sequence[Any], options: Mapping[str, Any]) -> None:
    """Make the tensors of a result parts, too, if their elements are those of parts."""
    name = func.__name__
    values = [*args, *options.values()]
    results = result
    if isinstance(result, Tensor):
        results = [result]
    if name == "grad":  # torch.autograd.grad(outputs, inputs)
        _mark_gradients(result, values[1])
    elif name.startswith("_foreach_"):
        lists = [each for each in values if isinstance(each, list | tuple)]
        for each, *inputs in zip(results, *lists, strict=True):
            _mark_elementwise(each, inputs)
    elif name in ELEMENTWISE:
        for each in results:
            _mark_elementwise(each, values)
    else:
        # What `cat` and `stack` join is a list.
        source = values[0] if isinstance(values[0], list | tuple) else values[:1]
        is_moved = name in MOVES or func in MOVING_PROPERTIES
        for each in results:
            _mark_rearranged(each, source, is_moved=is_moved)


def _mark_elementwise(result: Any, inputs: Sequence[Any]) -> None:
    part = _find_part(inputs)
    # Of another shape it is an activation, such as one that a gain of this rank's features scales.
    if part is not None and result.shape == part.shape:
        _make_part(result, part, part.cut_dim)


def _mark_rearranged(result: Any, inputs: Sequence[Any], *, is_moved: bool) -> None:
    part = _find_part(inputs)
    # One element is a number, which a program may print.
    if part is not None and isinstance(result, Tensor) and result.dim():
        _make_part(result, part, None if is_moved or result.shape != part.shape else part.cut_dim)


def _find_part(values: Sequence[Any]) -> CutTensor | None:
    return next((each for each in values if isinstance(each, CutTensor)), None)


def _make_part(result: Any, part: CutTensor, cut_dim: int | None) -> None:
    """Make a result a part, unless it is one, or a parameter, that was changed in place."""
    # The first question alone takes a tenth of the time.
    if type(result) is Tensor or not isinstance(result, CutTensor | nn.Parameter):
        # Also an ordinary tensor that was changed in place, such as an average of gradients.
        result.__class__ = CutTensor if type(part) is CutParameter else type(part)
        set_cut(result, part.group, cut_dim)


def _mark_gradients(gradients: Sequence[Any], inputs: Sequence[Tensor]) -> None:
    """Make gradients of parts parts, as in `grad`, for a penalty on them or a norm."""
    for gradient, part in zip(gradients, inputs, strict=True):
        if gradient is not None and isinstance(part, CutTensor):
            gradient.__class__ = CutGradient
            # Of a batch of gradients, the dimensions are others.
            is_alike = gradient.shape == part.shape
            set_cut(gradient, part.group, part.cut_dim if is_alike else None)
