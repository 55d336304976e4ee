"""Autograd's backward pass: its end, gradients as they are accumulated, and the tensors it starts from."""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle


class BackwardPass:
    """One pass at a time. Passes inside of it (re-entrant checkpointing) belong to it."""

    def __init__(self) -> None:
        self._callback: weakref.ref[Callable[[], None]] | None = None

    @property
    def is_running(self) -> bool:
        """Return whether a pass has begun and autograd still runs it."""
        return self._callback is not None and self._callback() is not None

    @property
    def is_unfinished(self) -> bool:
        """Return whether an exception ended a pass."""
        return self._callback is not None and self._callback() is None

    def begin(self, at_end: Callable[[], None]) -> None:
        """Ask autograd, during a pass, to call `at_end` when the pass is over."""
        callback = partial(at_end)  # a new object, which lives as long as autograd's record of the pass
        Variable._execution_engine.queue_callback(callback)
        self._callback = weakref.ref(callback)

    def reset(self) -> None:
        """Forget a pass that is over."""
        self._callback = None


def weak_hook(owner: Any, method: Callable[..., None], *args: object) -> Callable[..., None]:
    """Return a hook for autograd that calls `method(owner, ...)` under `owner.lock`. It does not keep `owner` alive."""
    reference = weakref.ref(owner)

    def call(*more: object) -> None:
        if (alive := reference()) is not None:
            with alive.lock:
                method(alive, *args, *more)

    return call


class GradientHooks:
    """Calls `method(owner, index, ...)` when autograd has added the gradient to a parameter's `grad`, as `weak_hook`.

    Hooks are on AccumulateGrad nodes, as in torch's DistributedDataParallel: hooks on the tensor or node that clip a
    gradient run before, and undefined gradients (None) are noticed. A parameter has one owner, the newest.
    """

    def __init__(self, owner: Any, method: Callable[..., None], parameters: Sequence[nn.Parameter]):
        self.is_superseded = False
        """Whether another owner has taken over a parameter."""
        self._parameters = parameters
        self._hooks = [weak_hook(owner, method, index) for index in range(len(parameters))]
        self._nodes: list[Any] = [None] * len(parameters)
        self._handles: list[RemovableHandle] = []
        self.rebind(range(len(parameters)))

    def rebind(self, indices: Sequence[int]) -> list[int]:
        """Hook the parameters whose node is new, as after a change of dtype. Return their indices."""
        rebound = []
        for index in indices:
            with torch.inference_mode(False):
                node = get_gradient_edge(self._parameters[index]).node
            if node is not self._nodes[index]:
                self._nodes[index] = node
                self._handles.append(handle := node.register_hook(self._hooks[index]))
                self._supersede_others(handle.hooks_dict_ref() or {})
                _by_handle[handle.id] = self
                rebound.append(index)
        return rebound

    def _supersede_others(self, hooks: dict[int, Any]) -> None:
        for number in list(hooks):
            other = _by_handle.get(number, self)
            if other is not self:
                del hooks[number]
                other.is_superseded = True

    def move_to_end(self) -> None:
        """Move behind hooks that were registered later. Autograd calls them in the order of insertion."""
        for handle in self._handles:
            hooks = handle.hooks_dict_ref()
            if hooks is not None and len(hooks) > 1 and handle.id in hooks:
                hooks[handle.id] = hooks.pop(handle.id)


_by_handle: weakref.WeakValueDictionary[int, GradientHooks] = weakref.WeakValueDictionary()


def tensors_in(value: Any, depth: int = 4) -> Iterator[Tensor]:
    """Yield the tensors in a model's inputs or outputs: in containers and attributes of objects, up to `depth` deep."""
    if isinstance(value, Tensor):
        yield value
    elif depth and not isinstance(value, str | bytes | int | float | nn.Module | type | None):
        if isinstance(value, Mapping):
            parts = list(value.values())
        elif isinstance(value, list | tuple | set | frozenset):
            parts = list(value)
        else:
            slots = [getattr(value, name, None) for name in getattr(type(value), "__slots__", ())]
            parts = [*getattr(value, "__dict__", {}).values(), *slots]
        for part in parts:
            yield from tensors_in(part, depth - 1)
