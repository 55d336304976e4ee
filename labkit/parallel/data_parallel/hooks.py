"""A wrapper's hooks on its parameters: behind all others, and of one wrapper per parameter.

They stand behind autograd's AccumulateGrad nodes, as those of torch's wrapper do. So a hook that clips a gradient, on
the tensor or on the node, has run before, whenever it was registered; and a gradient that a function leaves undefined
is heard of. A parameter that two wrappers average is averaged by none: a new wrapper takes it over.
"""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

Call = Callable[[Any, int, Tensor | None], None]
"""A method of the wrapper, not bound: (wrapper, index of the parameter, what autograd adds to its gradient)."""


class GradientHooks:
    """Calls `call` once autograd has put a gradient into `p.grad`, while the wrapper lives."""

    def __init__(self, wrapper: Any, call: Call, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters
        self.is_superseded = False
        self._hook = partial(_run, weakref.ref(wrapper), weakref.ref(self), call)
        self._nodes: list[Any] = [None] * len(parameters)
        self._handles: list[RemovableHandle] = []
        weakref.finalize(self, _remove, self._handles)
        self.rebind(range(len(parameters)))

    def rebind(self, indices: Sequence[int]) -> list[int]:
        """Hook the parameters whose node is new, and return them: it is after a change of dtype, even and back."""
        lost = []
        for index in indices:
            with torch.inference_mode(False):
                node = get_gradient_edge(self.parameters[index]).node
            if node is not self._nodes[index]:
                handle = node.register_hook(partial(self._hook, index))
                self._supersede_others(handle)
                self._nodes[index] = node
                self._handles.append(handle)
                lost.append(index)
        return lost

    def come_last(self) -> None:
        """Move behind hooks that were registered later. Autograd calls them in the order of their insertion."""
        for handle in self._handles:
            hooks = handle.hooks_dict_ref()
            if hooks is not None and len(hooks) > 1:
                hooks[handle.id] = hooks.pop(handle.id)

    def _supersede_others(self, handle: RemovableHandle) -> None:
        for hook in list((handle.hooks_dict_ref() or {}).values()):
            is_wrapper = isinstance(hook, partial) and hook.func is _run
            if is_wrapper and (other := hook.args[1]()) not in (self, None):
                other.is_superseded = True
                _remove(other._handles)


def _run(
    wrapper: "weakref.ref[Any]",
    hooks: "weakref.ref[GradientHooks]",
    call: Call,
    index: int,
    _: tuple[Tensor, ...],
    gradients: tuple[Tensor | None],
) -> None:
    if (alive := wrapper()) is not None:
        call(alive, index, gradients[0])


def _remove(handles: Sequence[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
