"""What `labkit try` says about causes that were planted, with the size that a plain loop measures.

    python benchmarks/planted_causes.py                      # ten minutes on two quiet cores
    python benchmarks/planted_causes.py loop --set batch=64  # a cause of another size

planted_setups.py has a setup per cause, and the same without it. Its true size is what a plain
loop takes longer with the cause than without it. Two more processes run these loops between the
steps that the lab times: the cores of a virtual machine change their speed every few seconds, and a
plain loop of another minute took 0.5 to 2.1 times as long. Exits 1 if another line or part is named
first, with a share of a step that is off by more than 15%, or of a step that is.

All processes keep the pages of freed tensors, unlike those of `labkit try`: tensors get new pages
in one step and old ones in the next, by what was freed before, and that is up to a third of a step,
in one process and not in another.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from statistics import median
from subprocess import PIPE, Popen
from typing import Any, NamedTuple

import numpy as np
import planted_setups

from labkit.bench.clock import time_parts_interleaved
from labkit.lab.config import parse_assignments
from labkit.lab.runs.measure import measure as measure_lab
from labkit.lab.runs.store import Run
from labkit.parallel.data_parallel import LOCAL
from labkit.studies.your_training import lab, worker
from labkit.studies.your_training.gains import gains
from labkit.studies.your_training.rank_tables import WITH_LOCAL, lateness
from labkit.studies.your_training.worker import TOGETHER, measure

WITHIN = 0.15
# Runs of each cause; the median error counts.
ATTEMPTS = 3
# Seconds of plain steps between two steps of the lab, with the cause and again without it.
TURN_S = 0.1
# Steps that the lab times: a fixed number, since its clock would count the plain ones.
ROUNDS = {"warmup": 2, "repeats": 16, "gain": 0.0, "rounds_s": 60.0}
FILE = Path(planted_setups.__file__)
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
    # The combination is no cause.
    table = table[table["change"] != TOGETHER]
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


class PlainSteps:
    """Two processes that run plain steps of a cause, with it and without it."""

    def __init__(self, cause: str, arguments: dict[str, Any]) -> None:
        self.planted_s: list[float] = []
        self.clean_s: list[float] = []
        self._processes = []
        for is_planted in (True, False):
            values = json.dumps(arguments | {"is_planted": is_planted})
            command = [sys.executable, str(FILE.with_name("plain_steps.py")), cause, values]
            self._processes.append(Popen(command, stdin=PIPE, stdout=PIPE, text=True))
        self.run_turn()  # warms up
        self.planted_s.clear()
        self.clean_s.clear()

    def run_turn(self) -> None:
        """Run plain steps for some time, and keep their medians."""
        for process, seconds in zip(self._processes, (self.planted_s, self.clean_s), strict=True):
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(f"{TURN_S}\n")
            process.stdin.flush()
            seconds.append(float(process.stdout.readline()))

    def rows(self, n_turns: int) -> Iterator[dict[str, Any]]:
        """End the processes; yield a row with the medians of the last turns."""
        for process in self._processes:
            process.communicate()
        planted, clean = self.planted_s[-n_turns:], self.clean_s[-n_turns:]
        yield {"kind": "plain", "planted": planted, "clean": clean}


def measure_with_plain_steps(point: Any) -> Any:
    """The lab's worker, with plain steps of the same cause between the steps that it times."""
    if point.sweep != "step":
        return measure(point)
    plain = PlainSteps(point.file.rpartition(":")[2], dict(point.arguments))

    def time_parts(alternatives: Any, **options: Any) -> Any:
        (parts,) = alternatives.values()

        def prepare(_: str) -> None:
            plain.run_turn()
            for part in parts.values():  # the plain steps have had the caches
                part()

        return time_parts_interleaved(alternatives, prepare=prepare, **options)

    worker.time_parts_interleaved = time_parts
    # Chained: a generator of this file would be on the stack, whose lines the lab looks at.
    return chain(measure(point), plain.rows(point.repeats))


class Attempt(NamedTuple):
    """What one run names first, and what plain loops measured between its steps."""

    named: Named
    true_share: float
    step_ratio: float
    """Of the lab's step to that of the plain loop with the cause."""


def attempt(cause: Cause, run: Run) -> Attempt:
    """Compare a run with the plain steps in it, in the same seconds of both."""
    plain = run.results().rows(["planted", "clean"], kind="plain").iloc[0]
    planted = np.array(plain["planted"])
    clean = np.array(plain["clean"])
    samples = lab.PART.samples(run.frame())
    steps = samples[samples["part"] == "step"].sort_values("repeat")["seconds"].to_numpy()
    true_share = float(np.median(1 - clean / planted))
    return Attempt(cause.read(run), true_share, float(np.median(steps / planted)))


def judge(attempts: list[Attempt], expected: str) -> str:
    """Say whether a cause is named in most attempts, with its true size or rightly not named."""
    if 2 * sum(one.named.name == expected for one in attempts) <= len(attempts):
        names = ", ".join(one.named.name or "nothing" for one in attempts)
        return f"MISSED: named are {names}"
    if expected:
        errors = [one.named.share / one.true_share - 1 for one in attempts]
        is_met = abs(median(errors)) <= WITHIN
    else:
        # Lines that take less of a step are not listed.
        largest = median(max(one.named.share, abs(one.true_share)) for one in attempts)
        is_met = largest <= lab.MIN_LINE_SHARE
    step_ratio = median(one.step_ratio for one in attempts)
    is_met = is_met and abs(step_ratio - 1) <= WITHIN
    shares = ", ".join(f"{one.named.share:.1%} for {one.true_share:.1%}" for one in attempts)
    return (
        f"{'met' if is_met else 'MISSED'}: {shares} of a step; the step is {step_ratio:.2f} of the"
        " plain one"
    )


def check_causes(folder: Path, causes: list[str], arguments: dict[str, Any]) -> int:
    """Print a line per cause; return how many are missed."""
    study = replace(lab.LAB, worker=measure_with_plain_steps)
    n_missed = 0
    for name in causes:
        cause = CAUSES[name]
        values = {"file": f"{FILE}:{name}", "arguments": arguments, **ROUNDS}
        values |= {"changes": cause.changes, "world_sizes": cause.world_sizes}
        config = study.configure("quick", values)
        attempts = []
        for _ in range(ATTEMPTS):
            run = measure_lab(study, config, profile="quick", directory=folder)
            attempts.append(attempt(cause, run))
        verdict = judge(attempts, cause.expected)
        n_missed += not verdict.startswith("met")
        print(f"{name:10} {cause.expected or 'costs nothing'}: {verdict}", flush=True)
    return n_missed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--set", nargs="*", default=[], help="arguments of the setups: batch=64")
    parser.add_argument("causes", nargs="*", help=f"of {', '.join(CAUSES)}; all by default")
    options = parser.parse_args()
    unknown = sorted({*options.causes} - {*CAUSES})
    if unknown:
        parser.error(f"unknown cause {unknown[0]}; there are {', '.join(CAUSES)}")
    arguments = dict(parse_assignments(options.set))
    os.environ.update(KEPT_PAGES)  # for the processes that measure, which start later
    with tempfile.TemporaryDirectory() as folder:
        return check_causes(Path(folder), options.causes or [*CAUSES], arguments)


if __name__ == "__main__":
    sys.exit(min(1, main()))
