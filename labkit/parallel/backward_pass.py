"""When autograd's pass begins and ends, also with an error, which other ranks must know of."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn

from labkit.parallel.failures import report_failure
from labkit.parallel.overlap import tensors_in
from labkit.parallel.prepare import disable_compile
from labkit.torch_private import queue_callback


class BackwardPass:
    """One pass at a time. Passes inside of it (re-entrant checkpointing) belong to it.

    The other ranks of `group` are told of a pass that an exception has ended (`failures`).
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._callback: weakref.ref[Callable[[], None]] | None = None
        self._watch: weakref.ref[Callable[[], None]] | None = None

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
        has_ended = False

        def end() -> None:
            nonlocal has_ended
            at_end()
            has_ended = True

        def report_if_unfinished(_: object) -> None:
            if not has_ended:
                report_failure(None, group)

        group = self._group
        # A new object, which lives as long as autograd's record of the pass: the engine drops its
        # callbacks with the record, also after an error, and nothing else tells. An error keeps the
        # frames of `end`, but not this.
        callback = partial(end)
        queue_callback(callback)
        self._callback = weakref.ref(callback)
        self._watch = weakref.ref(callback, report_if_unfinished)  # also after a reset

    def reset(self) -> None:
        """Forget a pass that is over."""
        self._callback = None


def report_failures(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Let ranks that wait for this one know if a forward or backward pass of a module fails.

    For modules that communicate inside: nothing else sees an error of the layers between.
    """
    backward = BackwardPass(group)

    @disable_compile
    def after_forward(_: nn.Module, __: object, outputs: Any) -> None:
        error = sys.exception()
        if outputs is None and isinstance(error, Exception):
            report_failure(error, group)
        for node in {tensor.grad_fn for tensor in tensors_in(outputs)}:
            if node is not None:
                node.register_prehook(begin_backward)

    def begin_backward(_: object) -> None:
        if not backward.is_running:
            backward.begin(lambda: None)

    module.register_forward_hook(after_forward, always_call=True)
