"""What `labkit try` says about causes that were planted, with the size that a plain loop measures.

    python benchmarks/planted_causes.py            # causes, a minute or two on two quiet cores
    python benchmarks/planted_causes.py --runs 10  # a change that changes nothing, ten times

A cause is the difference between two setups of a generated file, `planted` and `clean`. Its true
size is the difference between their steps, by plain loops in two processes that take turns: what
one training frees would be memory for the other in one process. Exits 1 if another line or part is
named first, with a size that is off by more than 15%, or if the true size before a run and that
after it differ by more than 15%: the machine was then not quiet enough to decide.

All processes use huge pages, unlike those of `labkit try`: tensors get new pages in one step and
old ones in the next, by what was freed before, and with small pages that is up to a third of a
step, in one process and not in another.
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
from statistics import median
from typing import Any, NamedTuple

import torch

from labkit.bench.statistics import NO_DIFFERENCE_SHOWN
from labkit.lab.runs.measure import measure as measure_lab
from labkit.lab.runs.store import Run
from labkit.studies.your_training import changes, lab
from labkit.studies.your_training.changes import Change
from labkit.studies.your_training.gains import describe_gain, gains
from labkit.studies.your_training.rank_tables import lateness
from labkit.studies.your_training.worker import measure

WITHIN = 0.15
WARM_UP_ROUNDS = 2
TRUE_ROUNDS = 9
STEPS_PER_TURN = 2
NOTHING = "nothing"
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
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
    """The comment of a line of the generated file, by which it is recognized."""
    number = int(line.partition(":")[2])
    return FILE.splitlines()[number - 1].partition("# ")[2]


def true_size(file: Path, cause: str) -> float:
    """Median difference between the steps of the two setups, in seconds."""
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
    differences = []
    for number in range(WARM_UP_ROUNDS + TRUE_ROUNDS):
        seconds = []
        for pipe in pipes:
            pipe.send(STEPS_PER_TURN)
            seconds.append(pipe.recv())
        if number >= WARM_UP_ROUNDS:
            differences.append(seconds[0] - seconds[1])
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send(0)
        process.join()
    return median(differences)


def _run_steps(file: Path, name: str, pipe: Any) -> None:
    """Run as many steps as are asked for, and send their median seconds, until 0 come."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    sys.path.insert(0, str(file.parent))
    step = _stepper(*getattr(importlib.import_module(file.stem), name)())
    while n_steps := pipe.recv():
        step()  # the other process has had the caches
        pipe.send(median(_seconds(step) for _ in range(n_steps)))


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


def judge(found: Named, expected: str, before_s: float, after_s: float) -> str:
    """Say whether a cause is named with its true size."""
    if found.name != expected:
        return "MISSED"
    if not expected:
        return "met"
    if abs(after_s / before_s - 1) > WITHIN:
        return "undecided: the machine was not quiet"
    is_right = abs(found.seconds / ((before_s + after_s) / 2) - 1) <= WITHIN
    return "met" if is_right else "MISSED"


def check_causes(folder: Path, causes: list[str]) -> int:
    """Print a line per cause; return how many are missed or undecided."""
    file = folder / "planted_file.py"
    file.write_text(FILE)
    missed = 0
    for cause in causes:
        read, expected, tried, world_sizes = CAUSES[cause]
        values = {"file": f"{file}:{cause}_planted", "changes": tried, "world_sizes": world_sizes}
        config = lab.LAB.configure("quick", values)
        before_s = true_size(file, cause)
        run = measure_lab(lab.LAB, config, profile="quick", directory=folder)
        after_s = true_size(file, cause)
        found = read(run)
        word = judge(found, expected, before_s, after_s)
        missed += word != "met"
        print(
            f"{cause:10} {found.name or 'not named':24} {1e3 * found.seconds:8.2f} ms,"
            f" in truth {1e3 * before_s:8.2f} ms, then {1e3 * after_s:8.2f} ms: {word}",
            flush=True,
        )
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
    return max(0, n_false - 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=0, help="runs of a change that changes nothing")
    parser.add_argument("causes", nargs="*", help=f"of {', '.join(CAUSES)}; all by default")
    options = parser.parse_args()
    if unknown := sorted({*options.causes} - {*CAUSES}):
        parser.error(f"unknown cause {unknown[0]}; there are {', '.join(CAUSES)}")
    os.environ.update(HUGE_PAGES)  # for the processes that measure, which start later
    with tempfile.TemporaryDirectory() as folder:
        if options.runs:
            return check_nothing(Path(folder), options.runs)
        return check_causes(Path(folder), options.causes or list(CAUSES))


if __name__ == "__main__":
    sys.exit(min(1, main()))
