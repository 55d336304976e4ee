"""One alternative's failure costs no other: what it raised is the reason in its own row, and the others are measured.

For points of one rank. On several, the ranks that go on would wait in a collective for the one that raised: there an
exception ends the point.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from labkit.bench.clock import time_parts_interleaved
from labkit.parallel.ranks.outcome import is_out_of_memory

Actions = Mapping[str, Callable[[], Any]]
"""What is timed of one alternative, by phase, in the order in which the phases follow one another."""


def reason_of(error: Exception, device: str) -> str:
    """What stands in the row of an alternative that raised: "out of memory: ..." or "failed: RuntimeError: ...".

    Raises the error again if the device can do nothing any more, as after an illegal memory access: CUDA then gives
    the same error to everything that follows, and it would be told of alternatives that are innocent.
    """
    if torch.device(device).type == "cuda":
        try:
            torch.cuda.synchronize()
        except Exception as dead:
            raise error from dead
    text = str(error).strip().partition("\n")[0]
    if is_out_of_memory(error):
        return f"out of memory: {text or type(error).__name__}"
    return f"failed: {type(error).__name__}: {text}".removesuffix(": ")


def time_those_that_run(
    alternatives: Mapping[str, Actions], *, device: str, **options: Any
) -> tuple[dict[str, dict[str, list[float]]], dict[str, str]]:
    """Seconds by alternative and phase, all taking turns; and by alternative that raised, the reason.

    Where one raises, its turn broke off halfway: the others are timed again from the start, without it. `options` are
    those of `time_parts_interleaved`.
    """
    failed: dict[str, str] = {}
    while running := {name: actions for name, actions in alternatives.items() if name not in failed}:
        called: list[str] = []
        noting = {
            name: {phase: _noting(called, name, action) for phase, action in actions.items()}
            for name, actions in running.items()
        }
        try:
            return time_parts_interleaved(noting, device=device, **options), failed
        except Exception as error:
            if not called:
                raise
            failed[called[-1]] = reason_of(error, device)
    return {}, failed


def _noting(called: list[str], name: str, action: Callable[[], Any]) -> Callable[[], Any]:
    def call() -> Any:
        called[:] = [name]
        return action()

    return call
