"""What `labkit try` says about causes that were planted, with the size that a plain loop measures.

    python benchmarks/planted_causes.py            # causes, ten minutes on two quiet cores
    python benchmarks/planted_causes.py --runs 10  # a change that changes nothing, ten times

A cause is the difference between two setups of a generated file, `planted` and `clean`. Its true
size is the difference between their steps, by plain loops in two processes that take turns: what
one training frees would be memory for the other in one process. Exits 1 if another line or part is
named first, or with a size that is off by more than 15%. The cores of a virtual machine may take
1.6 times as long half a minute later, so runs and true sizes take turns, and sizes are compared at
the speed of the true step.

All processes keep the pages of freed tensors, unlike those of `labkit try`: tensors get new pages
in one step and old ones in the next, by what was freed before, and that is up to a third of a step,
in one process and not in another.
"""

import argparse
import importlib
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

import torch

from labkit.bench.statistics import NO_DIFFERENCE_SHOWN
from labkit.lab.runs.measure import measure as measure_lab
from labkit.lab.runs.store import Run
from labkit.studies.your_training import changes, lab
from labkit.studies.your_training.changes import Change
from labkit.studies.your_training.gains import describe_gain, gains
from labkit.studies.your_training.rank_tables import lateness, scaling
from labkit.studies.your_training.worker import measure

WITHIN = 0.15
# Runs of each cause, with a true size before and after each; the median error counts.
ATTEMPTS = 5
WARM_UP_ROUNDS = 1
MIN_ROUNDS = 3
# Seconds of the rounds of a true size: single steps vary by a third.
TRUE_S = 4.0
# Seconds of steps between those of the other process: a training runs on and on.
TURN_S = 0.5
NOTHING = "nothing"
KEPT_PAGES = {
    "GLIBC_TUNABLES": f"glibc.malloc.mmap_threshold={2**25}:glibc.malloc.trim_threshold={2**31}"
}
FILE = """
import time
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader


class Attention(nn.Module):
    def __init__(self, by_hand):
        super().__init__()
        self.by_hand = by_hand

    def forward(self, x):
        if self.by_hand:
            x = x + (x @ x.transpose(-2, -1) / 8).softmax(-1) @ x  # attention by hand
        return x


class PerRow(nn.Module):
    def __init__(self, is_slow):
        super().__init__()
        self.is_slow = is_slow

    def forward(self, x):
        if self.is_slow:
            x = x + torch.stack([row * row.std() for row in x])  # a loop over the batch
        return x


def net(*middle):
    return nn.Sequential(nn.Linear(64, 64), *middle, nn.Linear(64, 64))


def mean_square(model, x):
    return model(x).square().mean()


def sleeping(batches):
    time.sleep(0.02)  # a slow disk
    return torch.stack(batches)


def loader(collate):
    return DataLoader(list(torch.randn(256, 64)), batch_size=8, collate_fn=collate)


def twice(model, x):
    mean_square(model, x)  # an unused forward
    return mean_square(model, x)


def with_item(model, x):
    loss = mean_square(model, x)
    loss.item()  # needless
    return loss


def late(model, x):
    if not dist.is_initialized() or dist.get_rank() == 1:
        time.sleep(0.2)
    return mean_square(model, x)


def adam(model, **options):
    return torch.optim.AdamW(model.parameters(), lr=1e-6, **options)


def returned(model, batches, loss, **options):
    return model, batches, loss, adam(model, **options)


wide = lambda: nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 64))
many = lambda: nn.Sequential(*[nn.Linear(32, 32) for _ in range(150)])
tokens = torch.randn(4, 1024, 64)
rows = torch.randn(256, 64)
few = torch.randn(4, 32)


def loader_planted(): return returned(net(), loader(sleeping), mean_square)
def loader_clean(): return returned(net(), loader(torch.stack), mean_square)
def attention_planted(): return returned(net(Attention(True)), [tokens], mean_square)
def attention_clean(): return returned(net(Attention(False)), [tokens], mean_square)
def loop_planted(): return returned(net(PerRow(True)), [rows], mean_square)
def loop_clean(): return returned(net(PerRow(False)), [rows], mean_square)
def unused_planted(): return returned(wide(), [tokens], twice)
def unused_clean(): return returned(wide(), [tokens], mean_square)
def item_planted(): return returned(wide(), [tokens], with_item)
def item_clean(): return returned(wide(), [tokens], mean_square)
def optimizer_planted(): return returned(many(), [few], mean_square, foreach=False)
def optimizer_clean(): return returned(many(), [few], mean_square, fused=True)
def rank_planted(): return returned(net(), [rows], late)
def rank_clean(): return returned(net(), [rows], mean_square)
"""


class Named(NamedTuple):
    """What a page names first, and its seconds."""

    name: str
    seconds: float


def first_part(run: Run) -> Named:
    """The part that takes most of a step."""
    table = lab.parts(run.results())
    row = table[table["part"] != "step"].sort_values("seconds").iloc[-1]
    return Named(row["part"], row["seconds"])


def first_line(run: Run) -> Named:
    """The line that takes most of a step."""
    row = lab.lines(run.results()).iloc[0]
    return Named(_text_of(row["line"]), row["seconds"])


def first_unused(run: Run) -> Named:
    """The line of which most is unused."""
    table = lab.lines(run.results()).sort_values("unused_s")
    row = table.iloc[-1]
    return Named(_text_of(row["line"]), row["unused_s"])


def first_gain(run: Run) -> Named:
    """The change that gains most."""
    table = gains(run.results()).query("verdict == 'faster'")
    if table.empty:
        return Named("", 0.0)
    return Named(table["change"].iloc[0], table["saved_s"].iloc[0])


def item_line(run: Run) -> Named:
    """The needless `.item()`, if it is named at all: on a CPU nothing waits for it."""
    lines = lab.lines(run.results())
    rows = lines[[_text_of(line) == "needless" for line in lines["line"]]]
    return Named("needless", rows["seconds"].iloc[0]) if len(rows) else Named("", 0.0)


def late_rank(run: Run) -> Named:
    """The rank that is late, and the part in which it is."""
    table = lateness(run.results()).query("is_late")
    if len(table) != 1:
        return Named("", 0.0)
    row = table.iloc[0]
    return Named(f"rank {row['rank']}, {row['part']}", row["later_s"])


class TrueSize(NamedTuple):
    """What a cause takes of a step, in seconds, and the step with it."""

    seconds: float
    planted_s: float
    """Of the whole step."""


class Attempt(NamedTuple):
    """What a run names first, its step, and the true ones before and after it."""

    named: Named
    step_s: float
    true: TrueSize

    @property
    def slowdown(self) -> float:
        """How much longer the run's step takes than the true one."""
        return self.step_s / self.true.planted_s

    @property
    def size_s(self) -> float:
        """The named size on cores as fast as those of the true step."""
        return self.named.seconds / self.slowdown

    def __str__(self) -> str:
        sizes = f"{1e3 * self.named.seconds:.2f} ms of {1e3 * self.step_s:.2f} ms"
        true = f"true {1e3 * self.true.seconds:.2f} ms of {1e3 * self.true.planted_s:.2f} ms"
        return f"{self.named.name or 'not named'}: {sizes}, {true}"


class Cause(NamedTuple):
    """How a cause is looked for in a run."""

    read: Callable[[Run], Named]
    expected: str
    """The name to expect; "" if the cause costs nothing."""
    changes: list[str] = []
    world_sizes: list[int] = []


def step_seconds(run: Run, cause: Cause) -> float:
    """The step of which a run names a part: the slowest rank's, or next to a change, or alone."""
    results = run.results()
    if cause.changes:
        row = gains(results).iloc[0]
        return float(row["saved_s"] / row["less_percent"] * 100)
    if cause.world_sizes:
        table = scaling(results)
        return float((table["seconds"] - table["exposed_s"]).iloc[0])
    return float(lab.parts(results).set_index("part")["seconds"]["step"])


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
    """The comment of a line of the generated file, by which it is recognized."""
    number = int(line.partition(":")[2])
    return FILE.splitlines()[number - 1].partition("# ")[2]


def true_size(file: Path, cause: str) -> TrueSize:
    """Return the median difference between the steps of the two setups."""
    # Spawned, since a fork would inherit the threads that torch has started here.
    context = multiprocessing.get_context("spawn")
    pipes = []
    processes = []
    for kind in ("planted", "clean"):
        pipe, other_end = context.Pipe()
        process = context.Process(target=_run_steps, args=(file, f"{cause}_{kind}", other_end))
        process.start()
        other_end.close()  # else nobody notices that the process has ended
        pipes.append(pipe)
        processes.append(process)

    def run_round() -> tuple[float, float]:
        seconds = []
        for pipe in pipes:
            pipe.send(TURN_S)
            seconds.append(pipe.recv())
        planted_s, clean_s = seconds
        return planted_s - clean_s, planted_s

    for _ in range(WARM_UP_ROUNDS):
        run_round()
    rounds: list[tuple[float, float]] = []
    end = time.perf_counter() + TRUE_S
    while len(rounds) < MIN_ROUNDS or time.perf_counter() < end:
        rounds.append(run_round())
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send(0)
        process.join()
    return TrueSize(*map(median, zip(*rounds, strict=True)))


def _run_steps(file: Path, name: str, pipe: Any) -> None:
    """Run steps for the seconds that are asked for, and send their median, until 0 come."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    sys.path.insert(0, str(file.parent))
    step = _stepper(*getattr(importlib.import_module(file.stem), name)())
    while turn_s := pipe.recv():
        end = time.perf_counter() + turn_s
        step()  # the other process has had the caches
        seconds = [_seconds(step)]
        while time.perf_counter() < end:
            seconds.append(_seconds(step))
        pipe.send(median(seconds))


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


def _seconds(action: Callable[[], None]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def judge(attempts: list[Attempt], expected: str) -> str:
    """Say whether a cause is named in most attempts, with its true size or rightly not named."""
    if 2 * sum(one.named.name == expected for one in attempts) <= len(attempts):
        return "MISSED: not named"
    size_s = median(one.size_s for one in attempts)
    true_s = median(one.true.seconds for one in attempts)
    planted_s = median(one.true.planted_s for one in attempts)
    slowdown = median(one.slowdown for one in attempts)
    # Lines that take less of a step are not listed.
    tolerance_s = WITHIN * true_s if expected else lab.MIN_LINE_SHARE * planted_s
    verdict = "met" if abs(size_s - true_s) <= tolerance_s else "MISSED"
    if abs(slowdown - 1) > WITHIN:
        verdict = "undecided"  # by cores of another speed, or by a step that is measured wrong
    sizes = f"{1e3 * size_s:.2f} ms for {1e3 * true_s:.2f} ms"
    return f"{verdict}: {sizes}, of a step with {slowdown:.0%} of its time"


def check_causes(folder: Path, causes: list[str]) -> int:
    """Print a line per attempt and cause; return how many causes are missed."""
    file = folder / "planted_file.py"
    file.write_text(FILE)
    missed = 0
    for cause in causes:
        read, expected, tried, world_sizes = CAUSES[cause]
        values = {"file": f"{file}:{cause}_planted", "changes": tried, "world_sizes": world_sizes}
        config = lab.LAB.configure("quick", values)
        attempts = []
        after = true_size(file, cause)
        for _ in range(ATTEMPTS):
            before = after
            run = measure_lab(lab.LAB, config, profile="quick", directory=folder)
            after = true_size(file, cause)
            true = TrueSize(*map(mean, zip(before, after, strict=True)))
            attempts.append(Attempt(read(run), step_seconds(run, CAUSES[cause]), true))
            print(f"  {cause:10} {attempts[-1]}", flush=True)
        verdict = judge(attempts, expected)
        missed += not verdict.startswith("met")
        print(f"{cause:10} {expected or 'costs nothing'}: {verdict}", flush=True)
    return missed


def measure_with_nothing(point: Any) -> Any:
    """The lab's worker, with a change that changes nothing."""
    add_nothing()
    return measure(point)


def add_nothing() -> None:
    """Add a change that changes nothing to labkit's.

    By its module: a rank gets copies of this script's globals.
    """
    nothing = Change(lambda loop: None, lambda training: None, "", "")
    changes.CHANGES[NOTHING] = nothing  # type: ignore[index]


def check_nothing(folder: Path, n_runs: int) -> int:
    """Print what a change that changes nothing gains in each run; return 0 if at most one does."""
    file = folder / "planted_file.py"
    file.write_text(FILE)
    add_nothing()
    study = replace(lab.LAB, worker=measure_with_nothing)
    verdicts = []
    for number in range(n_runs):
        values = {"file": f"{file}:attention_clean", "changes": [NOTHING], "world_sizes": []}
        config = study.configure("quick", values | {"seed": number})
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
    parser.add_argument("causes", nargs="*", help=f"of {', '.join(CAUSES)}; all by default")
    options = parser.parse_args()
    unknown = sorted({*options.causes} - {*CAUSES})
    if unknown:
        parser.error(f"unknown cause {unknown[0]}; there are {', '.join(CAUSES)}")
    os.environ.update(KEPT_PAGES)  # for the processes that measure, which start later
    with tempfile.TemporaryDirectory() as folder:
        if options.runs:
            return check_nothing(Path(folder), options.runs)
        return check_causes(Path(folder), options.causes or list(CAUSES))


if __name__ == "__main__":
    sys.exit(min(1, main()))
