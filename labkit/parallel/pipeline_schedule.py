"""Schedules of a pipeline as data: the order of each rank's tasks, and when they run.

A schedule lists each rank's tasks (stage, "F" or "B", micro-batch) in order. With p ranks, m
micro-batches and stages of equal time:

    schedule       order on rank r                                    idle share          holds
    gpipe          all forward, then all backward                     (p-1) / (m+p-1)     m
    1f1b           p-1-r forward, then forward and backward in turn   (p-1) / (m+p-1)     p-r
    interleaved    the same, v stages r, r+p, ..., in groups of p     (p-1) / (v m+p-1)   more

`holds`: micro-batches whose activations a rank has at most; `peak_activations` counts them.

Messages block until the other side takes part, so their order matters. `simulate` gives every task
a time. A message is sent when its task ends, on both ranks before any task that starts then or
later. All ranks follow that one order in time, so the earliest unfinished message or task can
always go on: nothing waits forever.

Sources: Huang et al. 2018, "GPipe" (arXiv:1811.06965); Narayanan et al. 2021 (arXiv:2104.04473),
section 2.2, for 1F1B and interleaving.
"""

from collections.abc import Sequence
from functools import cache
from itertools import accumulate, pairwise
from typing import NamedTuple

SCHEDULES = ("gpipe", "1f1b", "interleaved")
SIMULATED_S = {"F": 1.0, "B": 2.0}  # a task's time in `simulate`


class Task(NamedTuple):
    """Forward or backward of one micro-batch through one stage. Stage s is on rank s modulo p."""

    stage: int
    kind: str  # "F" or "B"
    micro_batch: int

    @property
    def destination(self) -> "Task":
        """The task that needs this one's result: of the next stage, or of the one before."""
        return self._replace(stage=self.stage + (1 if self.kind == "F" else -1))


class TaskTime(NamedTuple):
    """When a task ran, in seconds."""

    task: Task
    start_s: float
    end_s: float


Schedule = list[list[Task]]  # by rank: its tasks in order


def make_schedule(name: str, ranks: int, micro_batches: int, *, chunks: int = 1) -> Schedule:
    """Return every rank's tasks in order; `chunks`: stages per rank, 1 unless interleaved.

    Raises ValueError for another name, and for numbers below 1.
    """
    if name not in SCHEDULES:
        raise ValueError(f"expected a schedule among {', '.join(SCHEDULES)}, got {name!r}")
    if min(ranks, micro_batches, chunks) < 1 or (chunks > 1) != (name == "interleaved"):
        got = f"{name} with {ranks} ranks, {micro_batches} micro-batches, {chunks} stages per rank"
        raise ValueError(
            "expected 1 or more of each, and several stages per rank if interleaved only, got"
            f" {got}"
        )
    return [_order_tasks(name, rank, ranks, micro_batches, chunks) for rank in range(ranks)]


def _order_tasks(name: str, rank: int, ranks: int, micro_batches: int, chunks: int) -> list[Task]:
    """Return a rank's tasks: forward ones first, then both in turn, then backward ones."""
    stages = range(rank, chunks * ranks, ranks)
    groups = _group_micro_batches(micro_batches, ranks)
    forward = []
    backward = []
    for group in groups:
        forward += [Task(stage, "F", number) for stage in stages for number in group]
        backward += [Task(stage, "B", number) for stage in reversed(stages) for number in group]
    if name == "gpipe":
        n_first = len(forward)
    elif name == "1f1b":
        # Ranks behind this one: its first backward pass waits for theirs.
        n_first = ranks - 1 - rank
    else:
        n_first = 2 * (ranks - 1 - rank) + (chunks - 1) * len(groups[-1])
    n_first = min(n_first, len(forward))
    # Not strict: the last backward passes have no forward pass left to take turns with.
    pairs = zip(forward[n_first:], backward, strict=False)
    in_turn = [task for pair in pairs for task in pair]
    return forward[:n_first] + in_turn + backward[len(forward) - n_first :]


def _group_micro_batches(micro_batches: int, ranks: int) -> list[range]:
    """Return groups of p micro-batches, or of a few more if p does not divide their number."""
    n_groups = max(1, micro_batches // ranks)
    starts = [micro_batches * i // n_groups for i in range(n_groups + 1)]
    return [range(start, end) for start, end in pairwise(starts)]


def simulate(schedule: Schedule) -> list[list[TaskTime]]:
    """Return when tasks run if forward takes 1 s, backward 2 s, and messages no time.

    ValueError for a deadlock.
    """
    last = max(task.stage for order in schedule for task in order)
    ends: dict[Task, float] = {}
    times: list[list[TaskTime]] = [[] for _ in schedule]
    while waiting := [
        order[len(done)]
        for order, done in zip(schedule, times, strict=True)
        if len(done) < len(order)
    ]:
        before = len(ends)
        for task in waiting:
            done = times[task.stage % len(schedule)]
            needed = _needed(task, last)
            if ends.keys() >= {*needed}:
                start = max([ends[each] for each in needed] + [done[-1].end_s if done else 0.0])
                ends[task] = start + SIMULATED_S[task.kind]
                done.append(TaskTime(task, start, ends[task]))
        if len(ends) == before:
            raise ValueError(
                f"expected a schedule in which no task waits forever; {waiting[0]} does"
            )
    return times


def _needed(task: Task, last: int) -> list[Task]:
    """Return the tasks that must end first: the neighbor's, and this stage's forward pass."""
    needed = []
    if task.kind == "B":
        needed.append(task._replace(kind="F"))
        if task.stage < last:
            needed.append(task._replace(stage=task.stage + 1))
    elif task.stage:
        needed.append(task._replace(stage=task.stage - 1))
    return needed


def peak_activations(order: Sequence[Task]) -> int:
    """Return how many micro-batches a rank holds at most: forward done, backward not."""
    return max(accumulate(1 if task.kind == "F" else -1 for task in order), default=0)


def balance(costs: Sequence[float], stages: int) -> list[range]:
    """Cut layers into consecutive stages that minimize the largest stage's cost."""

    @cache
    def cut(first: int, number: int) -> tuple[float, tuple[int, ...]]:
        if number == 1:
            return sum(costs[first:]), (first,)
        rests = {end: cut(end, number - 1) for end in range(first + 1, len(costs) - number + 2)}
        return min(
            (max(sum(costs[first:end]), rest), (first, *starts))
            for end, (rest, starts) in rests.items()
        )

    starts = cut(0, stages)[1]
    return [range(start, end) for start, end in zip(starts, [*starts[1:], len(costs)], strict=True)]


def plan_rank(schedule: Schedule, rank: int) -> list[tuple[bool, Task]]:
    """Return a rank's tasks and messages in the order of all ranks.

    Each is (is a message, task that runs or sends).
    """
    last = max(task.stage for order in schedule for task in order)
    events = []
    for task, start, end in (each for times in simulate(schedule) for each in times):
        ranks = [task.stage % len(schedule)]
        # 1 sorts behind messages of the same moment, which that task may need.
        events.append((start, 1, task, ranks))
        if 0 <= task.destination.stage <= last:
            events.append((end, 0, task, [*ranks, task.destination.stage % len(schedule)]))
    return [(not is_task, task) for _, is_task, task, ranks in sorted(events) if rank in ranks]
