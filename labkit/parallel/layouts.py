"""How ranks have a parameter: cut, or on several of them; and the gradient of a cut one.

A parameter says in its attribute `layouts` how the ranks of a group have it. A parameter without a
layout for a group is only on this rank, as a layer of a pipeline is.

Cutting a model by torch's DTensor was measured: autograd through `to_local()` makes a small step
1.4 to 1.5 times as long, and AdamW 1.6 to 1.9 times. Parameters of labkit's wrappers are therefore
ordinary tensors with layouts. For `torch.nn.utils.clip_grad_norm_` and `GradScaler`, the gradient
of a `CutParameter` is a `CutGradient`; state dicts have DTensors (`labkit.parallel.tensor`).
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import CodeType
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labkit.torch_private import AMP_CHECK, FOREACH_NORM, DisableTorchFunctionSubclass


@dataclass(frozen=True, eq=False)
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


class CutTensor(Tensor):
    """What is computed from a cut gradient. Functions that mix its elements are refused.

    Muon, Adafactor and LBFGS would compute with this rank's part of a matrix as if it were all of
    it. What such an optimizer makes of a gradient first, element by element, is a part, too.
    `detach()` and `clone()` give ordinary tensors, as optimizers keep them.
    """

    result_class: type[Tensor]
    refuses_numbers = False
    """Whether a norm or a sum of all elements is refused, too. Logs may read the part's."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        with DisableTorchFunctionSubclass():
            result = func(*args, **options)
        if not isinstance(result, Tensor):
            return _refuse(func) if cls.refuses_numbers and func is FOREACH_NORM else result
        if result is options.get("out") or any(result is each for each in args[:1]):
            return result  # in place
        if result.dim() or func is Tensor.dot or cls.refuses_numbers:
            if func.__name__ in _MIXES_ELEMENTS:
                _refuse(func)
            if func.__name__ not in ("detach", "clone"):
                result.__class__ = cls.result_class
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        # States of optimizers are loaded where there are no ranks.
        with DisableTorchFunctionSubclass():
            return self.detach().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Any:
        return memo.setdefault(id(self), self.clone())


CutTensor.result_class = CutTensor


class CutTensorInStep(CutTensor):
    """What is computed from a cut parameter, or its gradient, in the step of an optimizer."""

    refuses_numbers = True


CutTensorInStep.result_class = CutTensorInStep


def _refuse(func: Any) -> NoReturn:
    raise ValueError(
        "expected an optimizer that treats each element alone, as SGD and Adam do:"
        f" {func.__name__}() of a cut matrix's part is not the matrix's"
    )


class CutGradient(CutTensor):
    """This rank's part of a gradient. Two functions of torch are collectives for it.

    The norm in `torch.nn.utils.clip_grad_norm_` is that of all ranks' parts, and an overflow that
    `GradScaler` finds in any part is found on all ranks.
    """

    group: dist.ProcessGroup

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _READ_BY_TRAINERS:
            # First, since optimizers call some operators per gradient.
            return super().__torch_function__(func, types, args, kwargs)
        options = kwargs or {}
        with DisableTorchFunctionSubclass():
            # Before all else: the functions below correct what torch has computed of this rank's
            # part.
            result = func(*args, **options)
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


# Names of functions that mix elements of a matrix, if their result is more than one number.
_PRODUCTS = ("matmul", "mm", "addmm", "bmm", "baddbmm", "dot", "einsum")
_DECOMPOSITIONS = ("linalg_svd", "svd", "linalg_qr", "qr", "linalg_eigh")
_NORMS = ("norm", "linalg_norm", "linalg_vector_norm", "frobenius_norm")
_REDUCTIONS = ("mean", "sum", "max", "min", "amax", "amin", "var", "std")
_MIXES_ELEMENTS = {*_PRODUCTS, *_DECOMPOSITIONS, *_NORMS, *_REDUCTIONS}


_GRAD: Any = Tensor.grad


class CutParameter(nn.Parameter):
    """This rank's part of a parameter. Its `grad` is a `CutGradient`, whoever has set it.

    Marking gradients after each backward pass would miss those that a data-parallel wrapper or a
    user puts in their place later.
    """

    elementwise_reader: CodeType | None = None
    """The method by which an optimizer of `ELEMENTWISE` reads the gradient, once one has."""
    is_watched = False
    """Whether an optimizer has read the gradient, and is watched if it is not torch's."""

    def _read_gradient(self) -> Any:
        """Return the gradient of this rank's part."""
        if not self.is_watched:
            self._watch_optimizer()
        gradient = _GRAD.__get__(self)
        reader = sys._getframe(1).f_code
        if reader is self.elementwise_reader or reader is _ZERO_GRAD:
            # Such an optimizer gets ordinary tensors: Python would see each operator of its step,
            # for nothing.
            if isinstance(gradient, CutTensor) and reader is not _ZERO_GRAD:
                return gradient.as_subclass(Tensor)
        elif type(gradient) is Tensor:
            gradient = gradient.as_subclass(CutGradient)
            gradient.group = cast(Layout, find_cut(self)).group
            _GRAD.__set__(self, gradient)  # the same object the next time, as of any parameter
        return gradient

    grad: Any = property(_read_gradient, _GRAD.__set__, _GRAD.__delete__)

    def _watch_optimizer(self) -> None:
        """Watch the steps of the optimizer that reads the gradient, if one does.

        Nobody tells a parameter its optimizer, and a hook on all optimizers would change torch for
        others. Readers that are none, as clipping, come before or after it.
        """
        frame = sys._getframe(2)
        for _ in range(READER_FRAMES):
            optimizer = frame.f_locals.get("self")
            if isinstance(optimizer, torch.optim.Optimizer):
                self.is_watched = True
                kind: Any = type(optimizer)
                is_ours = kind.__module__.startswith("labkit.")  # has torch's inside
                if kind in ELEMENTWISE:
                    self.elementwise_reader = kind._init_group.__code__
                elif not is_ours and optimizer not in _watched:
                    _watched.add(optimizer)
                    optimizer.register_step_pre_hook(partial(_set_classes, True))
                    optimizer.register_step_post_hook(partial(_set_classes, False))
                    if frame.f_code.co_name != "zero_grad":
                        _set_classes(True, optimizer)  # its first step has begun
                return
            if frame.f_back is None:
                return
            frame = frame.f_back


class CutParameterInStep(CutParameter):
    """This rank's part while an optimizer steps that may compute norms of whole parameters."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.is_grad_enabled():  # an error has ended the step
            with DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return CutTensorInStep.__torch_function__(func, types, args, kwargs)


# Frames from an optimizer's method to what reads gradients for it.
READER_FRAMES = 4
# Optimizers of torch that treat each element alone; others are watched.
ELEMENTWISE = (
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
_ZERO_GRAD = inspect.unwrap(torch.optim.Optimizer.zero_grad).__code__
_watched: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def _set_classes(is_in_step: bool, optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Give cut parameters and gradients the classes that refuse norms, or their usual ones."""
    parameter_class = CutParameter
    gradient_class: type[CutTensor] = CutGradient
    if is_in_step:
        parameter_class = CutParameterInStep
        gradient_class = CutTensorInStep
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if isinstance(parameter, CutParameter):
                gradient = parameter.grad
                if isinstance(gradient, CutTensor):
                    gradient.__class__ = gradient_class
                parameter.__class__ = parameter_class


def _norm_of_parts(
    grads: Sequence[Tensor], norms: Sequence[Tensor], ord: float = 2.0, **_: Any
) -> Sequence[Tensor]:
    """Turn the norms of cut gradients into those of all ranks' parts, with one message."""
    cut = [i for i, grad in enumerate(grads) if isinstance(grad, CutGradient)]
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
