"""One alternative's failure costs no other: what it raised is the reason in its own row, and the others are measured.

On several ranks only if all of them raised: ranks that go on would wait in a collective for one that did not, so that
there an exception ends the point.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from labkit.bench.clock import time_parts_interleaved
from labkit.lab.own_models import readers_line
from labkit.parallel.ranks.outcome import is_out_of_memory

PATIENCE_S = 2.0  # ranks that make the same mistake make it at about the same time

Actions = Mapping[str, Callable[[], Any]]
"""What is timed of one alternative, by phase, in the order in which the phases follow one another."""


def reason_of(error: Exception, device: str) -> str:
    """What stands in the row of an alternative that raised: "out of memory: ..." or "failed: RuntimeError: ...".

    Of a reader's own also where: "..., line 3 of the cell".

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
    return f"failed: {type(error).__name__}: {text}".removesuffix(": ") + readers_line(error)


def reason_on_all_ranks(error: Exception, key: str, device: str) -> str:
    """`reason_of` an error that every rank has raised.

    Raises the error again if another rank does not follow within `PATIENCE_S`. `key` is new for each attempt.
    """
    store, ranks = distributed_c10d._get_default_store(), dist.get_world_size()
    raised, deadline = store.add(f"raised {key}", 1), time.monotonic() + PATIENCE_S
    while raised < ranks:
        if time.monotonic() > deadline:
            raise error
        time.sleep(0.01)
        raised = store.add(f"raised {key}", 0)
    return reason_of(error, device)


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
