"""One alternative's failure costs no other: its error is the reason in its own row, and the others are measured.

`run_guarded` and `time_guarded` name it (`parallel.ranks.current_alternative`). On one rank the point goes on.
Several ranks may have left collectives halfway, which are then met by those of the next alternative: if any raises,
dies or hangs, the point is measured again in new ranks, and these two say of the alternative why it is left out. A rank
that is out of memory alone costs the point: the others' tensors may be to blame.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from labkit.bench.clock import Stopwatch, time_parts_interleaved
from labkit.lab.user_models import user_line
from labkit.parallel.ranks import current_alternative
from labkit.parallel.ranks.results import is_out_of_memory

PATIENCE_S = 2.0  # ranks that make the same mistake make it at about the same time

T = TypeVar("T")
Actions = Mapping[str, Callable[[], Any]]
"""The timed actions of one alternative by phase, in the order in which they follow one another."""


@dataclass(frozen=True)
class Failed:
    """Stands in the place of an alternative's results."""

    reason: str
    """For the `check` of its row: "failed: RuntimeError: ..."."""


def run_guarded(alternative: str, action: Callable[[], T], *, device: str) -> T | Failed:
    """Run the action and return its result, or the reason if this alternative fails now or has failed before.

    Raises on if the device is dead, and wherever there are several ranks.
    """
    if (reason := current_alternative.excluded_reason(alternative)) is not None:
        return Failed(reason)
    try:
        with guarded_turn(alternative, device):
            return action()
    except Exception as error:
        if _is_one_of_several():
            raise
        current_alternative.end()
        return Failed(reason_of(error, device))


def row_of(alternative: str, check: Callable[[], Mapping[str, Any]], *, device: str) -> dict[str, Any]:
    """Run `check` and return its row, or part of one; if it fails, a `check` with the reason."""
    row = run_guarded(alternative, check, device=device)
    return {"check": row.reason} if isinstance(row, Failed) else dict(row)


@contextmanager
def guarded_turn(alternative: str, device: str) -> Iterator[None]:
    """Attribute errors of the block to this alternative."""
    turn = current_alternative.begin(alternative)
    try:
        yield
    except Exception as error:
        _explain(error, device, turn)
        raise
    current_alternative.end()


class OutOfMemoryEverywhere(Exception):
    """All ranks are out of memory in one turn: that alternative needs more than there is."""


def _explain(error: Exception, device: str, turn: str) -> None:
    """Note what the row of the alternative should say whose turn it is, in case this error ends the rank's point.

    Raises `OutOfMemoryEverywhere` if that is so.
    """
    if not _is_one_of_several():
        current_alternative.explain(reason_of(error, device))
        return
    everywhere, out_of_memory = _how_all_ranks_raise(turn, is_out_of_memory(error))
    current_alternative.explain(reason_of(error, device, where="" if everywhere else f" on rank {dist.get_rank()}"))
    if out_of_memory:
        raise OutOfMemoryEverywhere(str(error)) from error


def reason_of(error: Exception, device: str, where: str = "") -> str:
    """Word the error of an alternative for its row: "out of memory: ..." or "failed: RuntimeError: ...".

    For a user's own also where: "..., line 3 of the cell".

    Raises the error again if the device can do nothing any more, as after an illegal memory access: CUDA then gives
    the same error to everything that follows, and innocent alternatives would be blamed.
    """
    if torch.device(device).type == "cuda":
        try:
            torch.cuda.synchronize()
        except Exception as dead:
            raise error from dead
    text = str(error).strip().partition("\n")[0]
    if is_out_of_memory(error):
        return f"out of memory: {text or type(error).__name__}"
    return f"failed{where}: {type(error).__name__}: {text}".removesuffix(": ") + user_line(error)


def _is_one_of_several() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1


def _how_all_ranks_raise(turn: str, out_of_memory: bool) -> tuple[bool, bool]:
    """Whether all ranks raise in this turn, and all for want of memory; they find each other within `PATIENCE_S`."""
    store, ranks = distributed_c10d._get_default_store(), dist.get_world_size()
    key, deadline = f"raised in {turn}", time.monotonic() + PATIENCE_S
    store.add(f"{key} for want of memory", int(out_of_memory))  # before it counts: who sees all counted sees all of it
    raised = store.add(key, 1)
    while raised < ranks and time.monotonic() < deadline:
        time.sleep(0.01)
        raised = store.add(key, 0)
    return raised >= ranks, raised >= ranks == store.add(f"{key} for want of memory", 0)


def time_guarded(
    alternatives: Mapping[str, Actions],
    *,
    device: str,
    alternative_of: Callable[[str], str] = str,
    prepare: Callable[[str], Any] | None = None,
    before: Callable[[], Any] | None = None,
    **options: Any,
) -> tuple[dict[str, dict[str, list[float]]], dict[str, str]]:
    """Seconds by turn and phase, all taking turns; and by alternative that failed, now or before, the reason.

    Where one raises, its turn broke off halfway: the others are timed again from the start, without it; on several
    ranks by measuring the point again. `alternative_of` a turn, if that is not the same. `prepare`, `before` and
    `options` are those of `time_parts_interleaved`.
    """
    names = dict.fromkeys(map(alternative_of, alternatives))
    failed = {name: why for name in names if (why := current_alternative.excluded_reason(name)) is not None}
    next_one = turn = ""

    def prepare_turn(name: str) -> None:
        """Blame the alternative for its inputs; until the barrier is passed, then the one before it again."""
        nonlocal next_one, turn
        last, next_one = current_alternative.name(), alternative_of(name)
        if prepare is None:
            return
        turn = current_alternative.begin(next_one)
        prepare(name)
        if last is None:
            current_alternative.end()
        else:
            turn = current_alternative.begin(last)

    def begin() -> None:
        """After the barrier: what breaks there is the doing of whose turn was last."""
        nonlocal turn
        if before is not None:
            before()
        turn = current_alternative.begin(next_one)

    options |= {"device": device, "prepare": prepare_turn, "before": begin}
    samples: dict[str, dict[str, list[float]]] = {}
    while running := {name: of for name, of in alternatives.items() if alternative_of(name) not in failed}:
        try:
            samples = time_parts_interleaved(running, **options)
            break
        except Exception as error:
            if (blamed := current_alternative.name()) is None:
                raise
            _explain(error, device, turn)
            if _is_one_of_several():
                raise
            failed[blamed] = reason_of(error, device)
            current_alternative.end()
    current_alternative.end()
    return samples, failed


def timed_rows(
    rows: Mapping[str, dict[str, Any]], actions: Mapping[str, Callable[[], Any]], **options: Any
) -> Iterator[dict[str, Any]]:
    """Yield the row of each alternative: with the `seconds` of its action, or the reason of its failure.

    Of those with an action the ones whose `check` is "ok", or that have none, take turns; `options` are those of
    `time_guarded`.
    """
    for row in timed_phases(rows, {name: {"": action} for name, action in actions.items()}, "", **options):
        row.pop("", None)
        yield row


def timed_phases(
    rows: Mapping[str, dict[str, Any]],
    phases: Mapping[str, Actions],
    column: str = "phase",
    *,
    watches: Mapping[str, Stopwatch] = MappingProxyType({}),
    **options: Any,
) -> Iterator[dict[str, Any]]:
    """The same with a row per phase, which `column` names, and one for what `watches` an alternative has stopped."""
    right = {name: of for name, of in phases.items() if rows[name].get("check", "ok") == "ok"}
    samples, failed = time_guarded(right, **options)
    for name, row in rows.items():
        if name not in samples:
            yield row | ({"check": failed[name]} if name in failed else {})
            continue
        for phase, seconds in samples[name].items():
            yield row | {column: phase, "seconds": seconds}
        if name in watches and (laps := watches[name].seconds[-len(seconds) :]):
            yield row | {column: "waiting", "seconds": laps}
