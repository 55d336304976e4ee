"""Run and time alternatives so that the failure of one costs no other: its error is the reason in
its own row.

`row_of` and `time_guarded` name the current alternative (`ranks.results.current_alternative`). On
one rank the point continues after a failure. Several ranks may have left collectives halfway, and
the next alternative would meet these. So if any rank raises, dies or hangs, the point is measured
again by new ranks without that alternative, whose row has the reason. A rank that alone is out of
memory costs the point: the other alternatives' tensors may be to blame.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from labkit.bench.clock import time_parts_interleaved
from labkit.lab.user_models import user_line
from labkit.parallel.ranks.results import current_alternative, is_out_of_memory
from labkit.parallel.traffic import Collective, recorded_traffic

PATIENCE_S = 2.0  # ranks that make the same mistake make it at about the same time

Action = Callable[[], Any]


class OutOfMemoryEverywhere(Exception):
    """All ranks are out of memory in one turn: that alternative needs more than there is."""


def row_of(
    alternative: str, check: Callable[[], Mapping[str, Any]], *, device: str
) -> dict[str, Any]:
    """Run `check` and return its columns; a `check` with the reason if this alternative fails now
    or failed before.

    Raises if the device is dead, and on several ranks for every failure.
    """
    if (reason := current_alternative.excluded_reason(alternative)) is not None:
        return {"check": reason}
    try:
        with guarded_turn(alternative, device):
            return dict(check())
    except Exception as error:
        return {"check": _survive(error, device)}


def count_traffic(run: Action) -> tuple[dict[str, int], list[Collective]]:
    """Return collectives and the bytes that this rank sends in a run, without the notes by which
    ranks agree."""
    with recorded_traffic() as traffic:
        run()
    calls = [call for call in traffic if call.is_payload]
    return {"calls": len(calls), "sent_bytes": sum(call.sent_bytes for call in calls)}, calls


@contextmanager
def guarded_turn(alternative: str, device: str) -> Iterator[None]:
    """Blame this alternative for errors inside the block."""
    turn = current_alternative.begin(alternative)
    try:
        yield
    except Exception as error:
        _explain(error, device, turn)
        raise
    current_alternative.end()


def time_guarded(
    alternatives: Mapping[str, Mapping[str, Action]],
    *,
    device: str,
    prepare: Callable[[str], Any] | None = None,
    **options: Any,
) -> tuple[dict[str, dict[str, list[float]]], dict[str, str]]:
    """Time all alternatives in turns: seconds by alternative and phase, and the reasons of those
    that failed.

    After a failure the others start again. `prepare` and `options` are those of
    `time_parts_interleaved`.
    """
    failed = {
        name: why
        for name in alternatives
        if (why := current_alternative.excluded_reason(name)) is not None
    }
    turn = ""

    def begin(name: str) -> None:
        nonlocal turn
        turn = current_alternative.begin(name)
        if prepare is not None:
            prepare(name)

    samples: dict[str, dict[str, list[float]]] = {}
    while running := {name: parts for name, parts in alternatives.items() if name not in failed}:
        try:
            samples = time_parts_interleaved(running, device=device, prepare=begin, **options)
            break
        except Exception as error:
            if (blamed := current_alternative.name) is None:
                raise
            _explain(error, device, turn)
            failed[blamed] = _survive(error, device)
    current_alternative.end()
    return samples, failed


def timed_rows(
    rows: Mapping[str, dict[str, Any]],
    actions: Mapping[str, Action | Mapping[str, Action]],
    column: str = "phase",
    **options: Any,
) -> Iterator[dict[str, Any]]:
    """Yield each row with the `seconds` of its action, or the reason of its failure.

    An action in phases yields one row per phase, named in `column`. Only rows without a `check`, or
    whose `check` is "ok", are timed; `options` are those of `time_guarded`.
    """
    phases = {name: one if isinstance(one, Mapping) else {"": one} for name, one in actions.items()}
    right = {name: parts for name, parts in phases.items() if rows[name].get("check", "ok") == "ok"}
    samples, failed = time_guarded(right, **options)
    for name, row in rows.items():
        if name not in samples:
            yield row | ({"check": failed[name]} if name in failed else {})
        for phase, seconds in samples.get(name, {}).items():
            yield row | ({column: phase} if phase else {}) | {"seconds": seconds}


def check_and_time(
    rows: Mapping[str, dict[str, Any]],
    check: Callable[[str], tuple[Mapping[str, Any], Action | Mapping[str, Action]]],
    column: str = "phase",
    *,
    device: str,
    **options: Any,
) -> Iterator[dict[str, Any]]:
    """`timed_rows` of alternatives by name, after `check` has returned each one's columns and its
    action.

    A row that has `not_measured` is neither checked nor timed.
    """
    checked = dict[str, dict[str, Any]]()
    actions = dict[str, Action | Mapping[str, Action]]()

    def check_one(name: str) -> Mapping[str, Any]:
        columns, actions[name] = check(name)
        return columns

    for name, row in rows.items():
        is_measured = "not_measured" not in row
        checked[name] = row | (
            row_of(name, partial(check_one, name), device=device) if is_measured else {}
        )
    yield from timed_rows(checked, actions, column, device=device, **options)


def describe_failure(error: Exception, device: str, where: str = "") -> str:
    """Describe an error in one line: "out of memory: ..." or "failed: RuntimeError: ...".

    Code in a notebook is named with its line. Raises the error again if the device is dead, as
    after an illegal memory access: CUDA then gives the same error to everything that follows, and
    innocent alternatives would be blamed.
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


def _explain(error: Exception, device: str, turn: str) -> None:
    """Leave the reason for the alternative's row, in case this error ends the point on this rank.

    Raises `OutOfMemoryEverywhere` if all ranks are out of memory.
    """
    if not _is_one_of_several():
        current_alternative.explain(describe_failure(error, device))
        return
    everywhere, out_of_memory = _how_all_ranks_raise(turn, is_out_of_memory(error))
    where = "" if everywhere else f" on rank {dist.get_rank()}"
    current_alternative.explain(describe_failure(error, device, where))
    if out_of_memory:
        raise OutOfMemoryEverywhere(str(error)) from error


def _survive(error: Exception, device: str) -> str:
    """Return the reason of the failed alternative and end its turn; on several ranks raise the
    error."""
    if _is_one_of_several():
        raise error
    current_alternative.end()
    return describe_failure(error, device)


def _is_one_of_several() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1


def _how_all_ranks_raise(turn: str, out_of_memory: bool) -> tuple[bool, bool]:
    """Return whether all ranks raise in this turn, and all for lack of memory; they meet within
    `PATIENCE_S`."""
    store = distributed_c10d._get_default_store()
    ranks = dist.get_world_size()
    key = f"raised in {turn}"
    deadline = time.monotonic() + PATIENCE_S
    # first: a rank that sees all raise also sees all of these
    store.add(f"{key}, out of memory", int(out_of_memory))
    raised = store.add(key, 1)
    while raised < ranks and time.monotonic() < deadline:
        time.sleep(0.01)
        raised = store.add(key, 0)
    return raised >= ranks, raised >= ranks == store.add(f"{key}, out of memory", 0)
