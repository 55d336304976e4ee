"""Hooks in autograd's graph: a unit's outputs, or its inputs, have their gradients."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from labkit.parallel.overlap import tensors_in
from labkit.torch_private import apply_to_tensors, tree_flatten, tree_unflatten

OF_EVERY_MODULE = vars(nn.Module()).keys()  # attributes that hold no outputs


class Hook:
    """Calls a method with a unit. It keeps neither its object nor the unit alive.

    The graph has its hooks, and a model may have a part of the graph, as an attribute. torch hides
    such a cycle from the garbage collector.
    """

    def __init__(self, method: Callable[..., None], unit: Any, *args: object) -> None:
        self._method = weakref.WeakMethod(method)
        self._unit = weakref.ref(unit)
        self._args = args

    def __call__(self, *more: object) -> None:
        method = self._method()
        unit = self._unit()
        if method is not None and unit is not None:
            method(unit, *self._args, *more)


class _PostBackward(torch.autograd.Function):
    """Returns its inputs, and calls a hook once their gradients are complete."""

    @staticmethod
    def forward(ctx: Any, hook: Hook, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.hook = hook
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.hook()
        return (None, *gradients)


def register_post_backward(hook: Hook, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Call the hook when the gradients of a unit's inputs are complete; return the inputs to use.

    Autograd runs what was computed last first. So by then it has run all operators of the unit,
    whichever inputs they depend on. Only if all inputs are in containers the containers are
    searched, and copied: a module that fills one would not notice.
    """
    inputs: list[Any] = [*args, *kwargs.values()]
    spec = None
    if not any(isinstance(each, Tensor) and each.requires_grad for each in inputs):
        inputs, spec = tree_flatten((args, kwargs))
    indices = [
        index
        for index, each in enumerate(inputs)
        if isinstance(each, Tensor) and each.requires_grad
    ]
    if not indices:
        return args, kwargs
    results = _PostBackward.apply(hook, *(inputs[index] for index in indices))
    for index, result in zip(indices, results, strict=True):
        inputs[index] = result
    if spec is not None:
        return tree_unflatten(inputs, spec)
    return tuple(inputs[: len(args)]), dict(zip(kwargs, inputs[len(args) :], strict=True))


def find_gradient_nodes(modules: Sequence[nn.Module], value: Any) -> set[Any]:
    """Return the nodes that autograd reaches first on its way to what made a value's tensors.

    Also those of tensors that modules have as attributes: losses on the side.
    """
    nodes = set()
    for tensor in _tensors(modules, value):
        # A view that is changed in place later gets another node; its base keeps the node.
        for each in (tensor, tensor._base):
            if each is not None and each.grad_fn is not None:
                nodes.add(each.grad_fn)
    return nodes


def _tensors(modules: Sequence[nn.Module], value: Any) -> Iterator[Tensor]:
    yield from tensors_in(value)
    for module in modules:
        attributes = vars(module)
        for name in attributes.keys() - OF_EVERY_MODULE:
            if isinstance(attributes[name], Tensor | list | tuple | dict) and name[0] != "_":
                yield from tensors_in(attributes[name])


def cast(value: Any, dtype: torch.dtype | None) -> Any:
    """Cast the floating-point tensors in a value, in containers, too; None: leave them."""
    if dtype is None:
        return value
    return apply_to_tensors(
        lambda each: each.to(dtype) if each.is_floating_point() else each, value
    )
