"""The backward pass that is going on: heard of at its first sign, asked to call back at its end."""

import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.autograd import Variable


class BackwardPass:
    """One pass at a time; those inside of it (re-entrant checkpointing) belong to it."""

    def __init__(self) -> None:
        self._end: weakref.ref[Callable[[], None]] | None = None

    @property
    def is_running(self) -> bool:
        """Whether a pass that was heard of is still going on: what is heard of meanwhile belongs to it."""
        return self._end is not None and self._end() is not None

    def begin(self, at_end: Callable[[], None]) -> None:
        """Ask autograd, which runs a pass now, to call `at_end` when it is over. Without a reference to its owner."""
        call = partial(at_end)  # a new object, which lives as long as autograd's record of the pass
        Variable._execution_engine.queue_callback(call)
        self._end = weakref.ref(call)

    def forget(self) -> None:
        """It is over, or an exception has ended it."""
        self._end = None


def tensors_in(value: Any, depth: int = 4) -> Iterator[Tensor]:
    """The tensors in a model's inputs or outputs: containers and attributes of objects are looked into, so deep."""
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
