"""What `labkit try` says about causes that were planted, with the size that a plain loop measures.

    python benchmarks/planted_causes.py                      # ten minutes on two quiet cores
    python benchmarks/planted_causes.py loop --set batch=64  # a cause of another size
    python benchmarks/planted_causes.py --runs 10            # a change that changes nothing

planted_setups.py has a setup per cause, and the same without it. The true size is what a step takes
longer with the cause, by plain loops in two processes that take turns: what one training frees
would be memory for the other in one process. Exits 1 if another line or part is named first, with a
size that is off by more than 15%, or of a step that is.

Sizes are shares of a step. The cores of a virtual machine change between two speeds every few
seconds: a step of 12 ms takes 19 ms, in `labkit try` and in a plain loop alike, and its parts with
it. Steps themselves are compared at the higher speed, by the fastest of all.

All processes keep the pages of freed tensors, unlike those of `labkit try`: tensors get new pages
in one step and old ones in the next, by what was freed before, and that is up to a third of a step,
in one process and not in another.
"""

import argparse
import math
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import planted_setups
import torch

from labkit.bench.statistics import NO_DIFFERENCE_SHOWN
from labkit.lab.config import parse_assignments
from labkit.lab.runs.measure import measure as measure_lab
from labkit.lab.runs.store import Run
from labkit.parallel.data_parallel import LOCAL
from labkit.studies.your_training import changes, lab
from labkit.studies.your_training.changes import Change
from labkit.studies.your_training.gains import describe_gain, gains
from labkit.studies.your_training.rank_tables import WITH_LOCAL, lateness
from labkit.studies.your_training.worker import measure

WITHIN = 0.15
# Runs of each cause; the median error counts.
ATTEMPTS = 3
# Rounds of a true size, before the runs and after them.
TRUE_ROUNDS = 6
# Seconds of steps between those of the other process: a training runs on and on.
TURN_S = 0.5
FILE = Path(planted_setups.__file__)
NOTHING = "nothing"
KEPT_PAGES = {
    "GLIBC_TUNABLES": f"glibc.malloc.mmap_threshold={2**25}:glibc.malloc.trim_threshold={2**31}"
}


class Named(NamedTuple):
    """What a page names first, and its share of a step."""

    name: str
    share: float


UNNAMED = Named("", 0.0)


def first_part(run: Run) -> Named:
    """The part that takes most of a step."""
    table = lab.parts(run.results())
    row = table[table["part"] != "step"].sort_values("seconds").iloc[-1]
    return Named(row["part"], row["of_step_percent"] / 100)


def first_line(run: Run) -> Named:
    """The line that takes most of a step."""
    row = lab.lines(run.results()).iloc[0]
    return Named(_text_of(row["line"]), row["of_step_percent"] / 100)


def first_unused(run: Run) -> Named:
    """The line of which most is unused."""
    row = lab.lines(run.results()).sort_values("unused_s").iloc[-1]
    step_s = lab.parts(run.results()).set_index("part")["seconds"]["step"]
    return Named(_text_of(row["line"]), row["unused_s"] / step_s)


def first_gain(run: Run) -> Named:
    """The change that gains most."""
    table = gains(run.results()).query("verdict == 'faster'")
    if table.empty:
        return UNNAMED
    return Named(table["change"].iloc[0], table["less_percent"].iloc[0] / 100)


def item_line(run: Run) -> Named:
    """The needless `.item()`, if it is named at all: on a CPU nothing waits for it."""
    lines = lab.lines(run.results())
    rows = lines[[_text_of(line) == "needless" for line in lines["line"]]]
    return Named("needless", rows["of_step_percent"].iloc[0] / 100) if len(rows) else UNNAMED


def late_rank(run: Run) -> Named:
    """The rank that is late, and the part in which it is."""
    table = lateness(run.results()).query("is_late")
    if len(table) != 1:
        return UNNAMED
    row = table.iloc[0]
    share = row["later_s"] / local_steps(run).median()
    return Named(f"rank {row['rank']}, {row['part']}", share)


def local_steps(run: Run) -> Any:
    """Seconds of the slowest rank's steps without communication; of steps of one process else."""
    frame = run.frame()
    samples = WITH_LOCAL.samples(frame)
    if len(samples):
        return samples.loc[samples["strategy"] == LOCAL, "seconds"]
    samples = lab.PART.samples(frame)
    return samples.loc[samples["part"] == "step", "seconds"]


class TrueSize(NamedTuple):
    """A cause's share of a step, and the fastest step with it in seconds."""

    share: float
    fastest_s: float


class Cause(NamedTuple):
    """How a cause is looked for in a run."""

    read: Callable[[Run], Named]
    expected: str
    """The name to expect; "" if the cause costs nothing."""
    changes: list[str] = []
    world_sizes: list[int] = []


CAUSES = {
    "loader": Cause(first_part, "input"),
    "attention": Cause(first_line, "attention by hand"),
    "loop": Cause(first_line, "a loop over the batch"),
    "unused": Cause(first_unused, "an unused forward"),
    "optimizer": Cause(first_gain, "fused optimizer", changes=["fused optimizer", "one thread"]),
    "item": Cause(item_line, ""),
    "rank": Cause(late_rank, "rank 1, forward", world_sizes=[2]),
}


def _text_of(line: str) -> str:
    """The comment of a line of planted_setups.py, by which it is recognized."""
    number = int(line.partition(":")[2])
    return FILE.read_text().splitlines()[number - 1].partition("# ")[2]


def true_size(cause: str, arguments: dict[str, Any]) -> TrueSize:
    """Return what a step takes longer with a cause than without it."""
    # Spawned, since a fork would inherit the threads that torch has started here.
    context = multiprocessing.get_context("spawn")
    pipes = []
    processes = []
    for is_planted in (True, False):
        pipe, other_end = context.Pipe()
        values = arguments | {"is_planted": is_planted}
        process = context.Process(target=_run_steps, args=(cause, values, other_end))
        process.start()
        other_end.close()  # else nobody notices that the process has ended
        pipes.append(pipe)
        processes.append(process)

    def run_round() -> list[list[float]]:
        answers = []
        for pipe in pipes:
            pipe.send(TURN_S)
            answers.append(pipe.recv())
        return answers

    run_round()  # warms up
    shares = []
    fastest_s = math.inf
    for _ in range(TRUE_ROUNDS):
        planted, clean = run_round()
        shares.append(1 - median(clean) / median(planted))
        fastest_s = min(fastest_s, *planted)
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send(0)
        process.join()
    return TrueSize(median(shares), fastest_s)


def _run_steps(cause: str, arguments: dict[str, Any], pipe: Any) -> None:
    """Run steps for the seconds that are asked for, and send those of each, until 0 come."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    step = _stepper(*getattr(planted_setups, cause)(**arguments))
    while turn_s := pipe.recv():
        end = time.perf_counter() + turn_s
        step()  # the other process has had the caches
        seconds = []
        while not seconds or time.perf_counter() < end:
            start = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - start)
        pipe.send(seconds)


def _stepper(model: Any, batches: Any, loss: Any, optimizer: Any) -> Callable[[], None]:
    def forever() -> Any:
        while True:
            yield from batches

    source = forever()

    def step() -> None:
        value = loss(model, next(source))
        value.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def judge(attempts: list[Named], expected: str, true_share: float, step_ratio: float) -> str:
    """Say whether a cause is named in most attempts, with its true size or rightly not named.

    `step_ratio`: of the step whose share is named to the true one.
    """
    if 2 * sum(one.name == expected for one in attempts) <= len(attempts):
        names = ", ".join(one.name or "nothing" for one in attempts)
        return f"MISSED: named are {names}"
    share = median(one.share for one in attempts)
    # Lines that take less of a step are not listed.
    tolerance = WITHIN * true_share if expected else lab.MIN_LINE_SHARE
    is_met = abs(share - true_share) <= tolerance and abs(step_ratio - 1) <= WITHIN
    shares = ", ".join(f"{one.share:.1%}" for one in attempts)
    return (
        f"{'met' if is_met else 'MISSED'}: {shares} of a step for {true_share:.1%};"
        f" the step is {step_ratio:.2f} of the true one"
    )


def check_causes(folder: Path, causes: list[str], arguments: dict[str, Any]) -> int:
    """Print a line per cause; return how many are missed."""
    n_missed = 0
    for name in causes:
        cause = CAUSES[name]
        values = {"file": f"{FILE}:{name}", "arguments": arguments}
        values |= {"changes": cause.changes, "world_sizes": cause.world_sizes}
        config = lab.LAB.configure("quick", values)
        true_sizes = [true_size(name, arguments)]
        attempts = []
        fastest_s = math.inf
        for _ in range(ATTEMPTS):
            run = measure_lab(lab.LAB, config, profile="quick", directory=folder)
            attempts.append(cause.read(run))
            fastest_s = min(fastest_s, local_steps(run).min())
        true_sizes.append(true_size(name, arguments))
        step_ratio = fastest_s / min(one.fastest_s for one in true_sizes)
        true_share = mean(one.share for one in true_sizes)
        verdict = judge(attempts, cause.expected, true_share, step_ratio)
        n_missed += not verdict.startswith("met")
        print(f"{name:10} {cause.expected or 'costs nothing'}: {verdict}", flush=True)
    return n_missed


def measure_with_nothing(point: Any) -> Any:
    """The lab's worker, with a change that changes nothing."""
    add_nothing()
    return measure(point)


def add_nothing() -> None:
    """Add a change that changes nothing to labkit's."""
    nothing = Change(lambda loop: None, lambda training: None, "", "")
    # By its module: a rank gets copies of this script's globals.
    changes.CHANGES[NOTHING] = nothing  # type: ignore[index]


def check_nothing(folder: Path, n_runs: int) -> int:
    """Print what a change that changes nothing gains in each run; return 0 if at most one does."""
    add_nothing()
    study = replace(lab.LAB, worker=measure_with_nothing)
    verdicts = []
    for number in range(n_runs):
        values = {"file": f"{FILE}:attention", "arguments": {"is_planted": False}}
        values |= {"changes": [NOTHING], "world_sizes": [], "seed": number}
        config = study.configure("quick", values)
        results = measure_lab(study, config, profile="quick", directory=folder).results()
        (row,) = gains(results).to_dict("records")
        verdicts.append(row["verdict"])
        print(f"run {number}: {describe_gain(row)}", flush=True)
    n_false = sum(verdict != NO_DIFFERENCE_SHOWN for verdict in verdicts)
    print(f"{n_false} false gains or losses in {n_runs} runs")
    # At `FALSE_DISCOVERY_RATE` one false verdict in ten runs may be chance, two hardly ever.
    return max(0, n_false - 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=0, help="runs of a change that changes nothing")
    parser.add_argument("--set", nargs="*", default=[], help="arguments of the setups: batch=64")
    parser.add_argument("causes", nargs="*", help=f"of {', '.join(CAUSES)}; all by default")
    options = parser.parse_args()
    unknown = sorted({*options.causes} - {*CAUSES})
    if unknown:
        parser.error(f"unknown cause {unknown[0]}; there are {', '.join(CAUSES)}")
    arguments = dict(parse_assignments(options.set))
    os.environ.update(KEPT_PAGES)  # for the processes that measure, which start later
    with tempfile.TemporaryDirectory() as folder:
        if options.runs:
            return check_nothing(Path(folder), options.runs)
        return check_causes(Path(folder), options.causes or [*CAUSES], arguments)


if __name__ == "__main__":
    sys.exit(min(1, main()))
