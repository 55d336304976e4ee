"""Run and time alternatives so that the failure of one is the reason in its own row.

All name the current alternative (`ranks.results.current_alternative`), which a failure of the point
then names. On one rank the point goes on without an alternative that raised. On several ranks it
goes on only if all of them refuse the alternative in the check before measuring. Any later failure,
or one on some of the ranks, ends the point: collectives may be left halfway, and the next
alternative would meet their messages.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from labkit.bench.check import refusal_columns
from labkit.bench.clock import time_parts_interleaved
from labkit.machine.cgroups import available_cores
from labkit.machine.user_lines import DescribedError, user_line
from labkit.parallel.ranks.results import current_alternative, is_out_of_memory
from labkit.parallel.traffic import Collective, recorded_traffic
from labkit.parallel.transport import SHARED, transport_in_use
from labkit.torch_private import default_store

# Name of the alternative that computes on one rank, while the others wait.
ALL_CORES = "one rank, all cores"
PATIENCE_S = 2.0  # ranks that make the same mistake make it at about the same time

Action = Callable[[], Any]


def row_of(
    alternative: str, check: Callable[[], Mapping[str, Any]], *, device: str
) -> dict[str, Any]:
    """Run `check` and return its columns, or the status and reason of the alternative that failed.

    Raises the error if the device is dead, or if other ranks may be waiting for this one.
    """
    call_id = current_alternative.begin(alternative)
    with recorded_traffic() as traffic:
        try:
            columns = dict(check())
        except Exception as error:
            columns = describe_failure(error, device)
            is_halfway = bool(traffic) and _may_interrupt_collective(error)
            # Several ranks go on only if each of them has failed, and none between messages: one
            # that waits for a message would take the next alternative's for it.
            if _is_one_of_several() and (is_halfway or not _do_all_ranks_raise(call_id)):
                _note_user_line(error)
                raise
    current_alternative.end()
    return columns


def count_traffic(run: Action) -> tuple[dict[str, int], list[Collective]]:
    """Run it; return the collectives and bytes that this rank sends."""
    with recorded_traffic() as traffic:
        run()
    # Not the small messages by which ranks agree: formulas do not have them.
    calls = [call for call in traffic if call.is_payload]
    return {"calls": len(calls), "sent_bytes": sum(call.sent_bytes for call in calls)}, calls


def time_guarded(
    alternatives: Mapping[str, Mapping[str, Action]],
    *,
    device: str,
    prepare: Callable[[str], Any] | None = None,
    **options: Any,
) -> tuple[dict[str, dict[str, list[float]]], dict[str, dict[str, str]]]:
    """Time all alternatives in turns; return seconds by alternative and phase, and failures.

    On one rank the others start again after a failure: a round without one alternative is another
    round. On several ranks the error is raised. `prepare` and `options` are those of
    `time_parts_interleaved`.
    """
    failed = dict[str, dict[str, str]]()
    running = dict(alternatives)

    def begin(name: str) -> None:
        current_alternative.begin(name)
        if prepare is not None:
            prepare(name)

    samples: dict[str, dict[str, list[float]]] = {}
    while running:
        try:
            samples = time_parts_interleaved(running, device=device, prepare=begin, **options)
            break
        except Exception as error:
            # Without a name no alternative has begun: the options are wrong.
            failing = current_alternative.name
            if not failing or _is_one_of_several():
                _note_user_line(error)
                raise
            failed[failing] = describe_failure(error, device)
            current_alternative.end()
            del running[failing]
    current_alternative.end()
    return samples, failed


def timed_rows(
    rows: Mapping[str, dict[str, Any]],
    actions: Mapping[str, Action | Mapping[str, Action]],
    column: str = "phase",
    **options: Any,
) -> Iterator[dict[str, Any]]:
    """Yield each row with the `seconds` of its action, or the reason of its failure.

    An action in phases yields one row per phase, named in `column`. Only rows without a `status`,
    or whose `status` is "ok", are timed; `options` are those of `time_guarded`.
    """
    right: dict[str, Mapping[str, Action]] = {}
    for name, action in actions.items():
        if rows[name].get("status", "ok") == "ok":
            right[name] = action if isinstance(action, Mapping) else {"": action}
    samples, failed = time_guarded(right, **options)
    for name, row in rows.items():
        if name not in samples:
            yield row | failed.get(name, {})
        for phase, seconds in samples.get(name, {}).items():
            timed = row | {"seconds": seconds}
            if phase:
                timed[column] = phase
            yield timed


def check_and_time(
    rows: Mapping[str, dict[str, Any]],
    check: Callable[[str], tuple[Mapping[str, Any], Action | Mapping[str, Action]]],
    column: str = "phase",
    *,
    device: str,
    **options: Any,
) -> Iterator[dict[str, Any]]:
    """Check alternatives by name, then time those that are right (`timed_rows`).

    `check` returns an alternative's columns and its action. A row that has a status already is
    neither checked nor timed.
    """
    checked = dict[str, dict[str, Any]]()
    actions = dict[str, Action | Mapping[str, Action]]()

    def check_one(name: str) -> Mapping[str, Any]:
        columns, actions[name] = check(name)
        return columns

    for name, row in rows.items():
        checked[name] = row
        if "status" not in row:
            checked[name] = row | row_of(name, partial(check_one, name), device=device)
    yield from timed_rows(checked, actions, column, device=device, **options)


def sum_rounds(samples: Mapping[str, list[float]], parts: Iterable[str]) -> list[float]:
    """Return the sum of these parts' seconds in each round."""
    return [sum(seconds) for seconds in zip(*(samples[part] for part in parts), strict=True)]


def describe_failure(error: Exception, device: str) -> dict[str, str]:
    """Return the status of an alternative that raised, and the error in one line as its reason.

    Code in a notebook is named with its line. Raises the error again if the device is dead, as
    after an illegal memory access: CUDA then gives the same error to everything that follows, and
    innocent alternatives would be named.
    """
    if torch.device(device).type == "cuda":
        try:
            torch.cuda.synchronize()
        except Exception as dead:
            raise error from dead
    if isinstance(error, DescribedError):
        return {"status": "failed", "reason": str(error)}
    kind = type(error).__name__
    text = str(error).strip().partition("\n")[0]
    if is_out_of_memory(error):
        return {"status": "oom", "reason": text or kind}
    reason = f"{kind}: {text}" if text else kind
    return {"status": "failed", "reason": reason + user_line(error)}


def _note_user_line(error: Exception) -> None:
    """Add the line of a user's code to an error that ends the point, whose reason then has it."""
    line = user_line(error)
    if line:
        error.add_note(line.removeprefix(", "))


def shared_memory_refusal(device: str = "cpu") -> dict[str, str]:
    """Return the columns of what needs shared memory; none where ranks have it."""
    transport, reason = transport_in_use(device=torch.device(device))
    return {} if transport == SHARED else refusal_columns(reason)


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Run the block with a number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def cores_of_all_ranks() -> AbstractContextManager[None]:
    """Give this rank the threads of all ranks inside the block, for `ALL_CORES`.

    Each rank has its share of the cores. One that computes alone would leave the others' idle, and
    several ranks would look faster by exactly these cores.
    """
    return threads(min(available_cores(), torch.get_num_threads() * dist.get_world_size()))


def _is_one_of_several() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1


def _may_interrupt_collective(error: Exception) -> bool:
    """Return whether an error may come from between the messages of a collective.

    There the transports, gloo and NCCL raise a plain RuntimeError or a DistError, and memory may
    run out. Everything else, such as a wrong argument or a missing compiler, comes before them.
    """
    is_of_transport = type(error) is RuntimeError or isinstance(error, dist.DistError)
    return is_of_transport or is_out_of_memory(error)


def _do_all_ranks_raise(call_id: str) -> bool:
    """Return whether every rank raises in this call, within `PATIENCE_S`.

    They meet in the store, since a rank that does not raise may be waiting in a collective.
    """
    store = default_store()
    key = f"raised in {call_id}"
    deadline = time.monotonic() + PATIENCE_S
    n_raised = store.add(key, 1)
    while n_raised < dist.get_world_size() and time.monotonic() < deadline:
        time.sleep(0.01)
        # Adding 0 reads a counter.
        n_raised = store.add(key, 0)
    return n_raised >= dist.get_world_size()
