"""A wrapper's hooks on its parameters: after all others, and of one wrapper a parameter.

What is averaged is the gradient as all other hooks leave it, whenever they were registered: clipped, say. So it is with
torch's wrapper, whose own hook stands behind autograd's node. And a parameter that several wrappers average, each in
memory of its own and while the others do, is averaged by none: who wraps a model again takes it over.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

Heard = Callable[[Any, int, Tensor], None]
"""A method of the wrapper, not bound: (wrapper, index, parameter)."""


class GradientHooks:
    """Calls `heard(wrapper, index, parameter)` once autograd has put a gradient into `p.grad`, while the wrapper lives.

    `left_alone` are the model's other parameters, by name.
    """

    def __init__(
        self, wrapper: Any, heard: Heard, parameters: Sequence[nn.Parameter], left_alone: Mapping[str, nn.Parameter]
    ) -> None:
        self._parameters, self._left_alone = parameters, left_alone
        self._is_superseded = False
        for hook in [hook for parameter in parameters for hook in _hooks_on(parameter).values()]:
            if isinstance(hook, _Hook) and (older := hook.owner()) is not None:
                older._supersede()
        # Weakly: a parameter holds its hooks where the garbage collector does not look.
        of_hooks, of_wrapper = weakref.ref(self), weakref.ref(wrapper)
        self._handles = [
            parameter.register_post_accumulate_grad_hook(_Hook(of_hooks, of_wrapper, heard, index))
            for index, parameter in enumerate(parameters)
        ]
        weakref.finalize(self, _remove, self._handles)

    def check(self) -> None:
        """RuntimeError where gradients would not be averaged, and nobody would say so."""
        if self._is_superseded:
            raise RuntimeError(
                "this model, or a part of it, was wrapped again, and one wrapper averages a gradient: use the newest, "
                "or wrap copies (copy.deepcopy); modules that share parameters are wrapped together, as one module"
            )
        if any(parameter.requires_grad for parameter in self._left_alone.values()):
            trained = next(name for name, parameter in self._left_alone.items() if parameter.requires_grad)
            raise RuntimeError(f"{trained} is trained now, and was frozen when the model was wrapped: wrap it again")

    def come_last(self) -> None:
        """Move behind the hooks that were registered later. Autograd calls them in the order of their mapping.

        RuntimeError as `check`: the forward pass may have been before.
        """
        self.check()
        for parameter, handle in zip(self._parameters, self._handles, strict=True):
            hooks = _hooks_on(parameter)
            if next(reversed(hooks)) != handle.id:
                hooks[handle.id] = hooks.pop(handle.id)

    def _supersede(self) -> None:
        self._is_superseded = True
        _remove(self._handles)


class _Hook:
    """On the parameter at `index`; of the hooks of `owner`.

    Without a `WeakMethod`, which is written in Python: between products of matrices each line costs microseconds.
    """

    def __init__(
        self, owner: "weakref.ref[GradientHooks]", wrapper: "weakref.ref[Any]", heard: Heard, index: int
    ) -> None:
        self.owner, self._wrapper, self._heard, self._index = owner, wrapper, heard, index

    def __call__(self, parameter: Tensor) -> None:
        if (wrapper := self._wrapper()) is not None:
            self._heard(wrapper, self._index, parameter)


def _hooks_on(parameter: Tensor) -> dict[int, object]:
    hooks: dict[int, object] | None = parameter._post_accumulate_grad_hooks
    return {} if hooks is None else hooks


def _remove(handles: Sequence[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
