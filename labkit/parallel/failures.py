"""A rank whose pass has failed, while the others wait for its messages.

Ranks that fail together, as of a wrong shape, can go on together. One that fails alone, and whose
program catches the error, has left a pass that the others cannot complete. What they wait for is a
message, and a message of another pass would be taken for it.

So a rank whose forward or backward pass fails counts the failure in the store of its group
(`report_failure`). A thread then waits for the other ranks to do so, too. If one does not, the
group is over: its connections are closed, and ranks that wait raise, with the reason from the store
(`explain_failure`). A rank that goes on waits for this decision before its next pass
(`check_group`). Passes that succeed cost nothing: no thread, no message, no look at the store.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from typing import Any

import torch.distributed as dist

from labkit.machine.user_lines import deepest_user_line
from labkit.parallel.transport import Group, abort, member_group

# How long the other ranks may take to fail as well: they may still load the batch that fails.
# Naps, not seconds: on a machine that is busy with other things they take longer, as the ranks do.
NAPS = 30
NAP_S = 0.05
_END = "labkit: why the group is over"
# Seconds in which a thread ends with its program, unless the store is gone.
EXIT_S = 5

# The thread of this rank's last failure, until the next pass.
_decisions: weakref.WeakKeyDictionary[dist.ProcessGroup, threading.Thread] = (
    weakref.WeakKeyDictionary()
)
_program_ends = threading.Event()


@atexit.register
def _end_threads() -> None:
    """Let decisions be made now: a thread in torch when Python ends would abort the program."""
    _program_ends.set()
    for decision in [*_decisions.values()]:
        decision.join(EXIT_S)


class GroupOver(RuntimeError):
    """A rank has failed alone; the message says which, why and, in code of yours, at which line."""

    is_consequence = True  # a group of ranks that failed shows the other rank's error instead


def report_failure(error: BaseException | None, group: Group = None) -> None:
    """Note that a pass of this rank has failed; None: backward, where autograd does not say why."""
    members = member_group(group)
    if members.size() == 1 or members in _decisions:
        return  # of several wrappers of a model, each reports the same failure
    reason = "an error ended its backward pass"
    if error is not None:
        file, number = deepest_user_line(error)
        line = f", at {file}:{number}" if file else ""
        reason = describe_error(error) + line
    arguments = (members, f"rank {members.rank()}: {reason}")
    _decisions[members] = threading.Thread(target=_decide, args=arguments, daemon=True)
    _decisions[members].start()


def check_group(group: Group = None) -> None:
    """Raise GroupOver, before a pass, if the pass before failed on this rank and not on all."""
    if not _decisions:
        return
    members = member_group(group)
    decision = _decisions.pop(members, None)
    if decision is not None:
        decision.join()
        explain_failure(None, members.get_group_store())


def explain_failure(error: RuntimeError | None, store: Any) -> None:
    """Raise GroupOver if that is why a message has failed. `store`: the group's."""
    try:
        is_over = store is not None and store.check([_END])
    except RuntimeError:
        return  # the rank that has the store has left, which the error says
    if is_over:
        reason = store.get(_END).decode()
        raise GroupOver(
            f"{reason}; it failed alone, so this group is over: make a new one, and a new wrapper"
        ) from error


def describe_error(error: BaseException) -> str:
    """Return the first line of an error, with its type unless it is for a caller's mistake."""
    line = next(iter(str(error).splitlines()), "")
    if isinstance(error, ValueError):
        return line
    return f"{type(error).__name__}: {line}"


def _decide(members: dist.ProcessGroup, reason: str) -> None:
    """Wait for the other ranks to fail as well; end the group if one does not."""
    try:
        # A connection of its own: in that of the group, this rank may soon wait for a new group,
        # and so for the ranks that wait for it.
        group_store: Any = members.get_group_store()
        store = group_store.clone()
        number = store.add(_count_key(members.rank()), 1)
        naps = 0
        # If it is over, this rank fails because another one has, and others may wait for this one.
        while not store.check([_END]):
            counts = [store.add(_count_key(rank), 0) for rank in range(members.size())]
            if min(counts) >= number:
                return
            if naps == NAPS or _program_ends.is_set():
                store.set(_END, reason)
                break
            naps += 1
            _program_ends.wait(NAP_S)
        abort(members)
    except Exception:
        return  # the program has ended meanwhile, and its store with it


def _count_key(rank: int) -> str:
    return f"labkit: failures of rank {rank}"
