"""What `labkit try` prints: the step, changes, values of an argument, ranks, and the baseline."""

from collections.abc import Mapping
from typing import Any

from labkit.check.trainings import MIN_RUNS, TrainingChange
from labkit.lab.commands.console import print_table
from labkit.lab.project import runs_directory
from labkit.lab.runs.store import Run
from labkit.lab.units import counted, format_bytes, format_flops, format_seconds
from labkit.studies.your_training import lab
from labkit.studies.your_training.gains import (
    ARGUMENT,
    CHANGE,
    argument_times,
    describe_effects,
    describe_gain,
    fits,
    gains,
    sdpa_gains,
)
from labkit.studies.your_training.rank_tables import STRATEGY, lateness, scaling


class Summary:
    """What was measured, in a terminal: the step as soon as it is known, the changes in the end."""

    def __init__(self, console: Any) -> None:
        self._console = console
        self._has_step = False

    def print_step(self, name: str | None) -> None:
        """Print what a step costs once its point of this run has ended."""
        path = runs_directory() / lab.LAB.name / f"{name}.jsonl"
        if self._has_step or name is None or not path.exists():
            return
        # While the changes are still measured: a run can be read at any moment.
        run = Run.load(path)
        if len(lab.found(run.results())) and run.ends:
            self._has_step = True
            _print_step(self._console, run)

    def finish(self, run: Run) -> None:
        """Print the changes, why others were not measured, and where the run is."""
        if not self._has_step:
            _print_step(self._console, run)
        if run.is_busy:
            self._console.print(
                "busy     other programs were at work: nothing below is a gain; measure again"
            )
        rows = []
        for row in gains(run.results()).to_dict("records"):
            gain = describe_gain(row, is_busy=run.is_busy)
            rows.append((f"  {row['change']}", gain, describe_effects(row)))
        for row in sdpa_gains(run.results()).to_dict("records"):
            is_timed = isinstance(row["verdict"], str)
            gain = describe_gain(row, is_busy=run.is_busy) if is_timed else row["reason"]
            rows.append((f"  SDPA at {row['line']}", gain, f"of the attention {row['shape']}"))
        if rows:
            self._console.print("changes, each in turns with yours, gradients compared:")
        print_table(rows, console=self._console)
        _print_arguments(self._console, run)
        _print_ranks(self._console, run)
        failures = [*CHANGE.failures(run.frame()), *ARGUMENT.failures(run.frame())]
        failures += STRATEGY.failures(run.frame(), names=lab.LAB.names)
        for note in failures:
            if note.status != "refused":
                names = ", ".join(note.names)
                self._console.print(f"  {names}: {note.status}: {note.reason}")
        for note in run.results().missing:
            self._console.print(f"not measured: {note.reason}")
        self._console.print(f"page     labkit report --run {run.name}")

    def print_change(self, change: TrainingChange, run: Run) -> None:
        """Print what changed from the baseline to a run, and what may explain it."""
        newest = change.baseline[-1]
        n_runs = counted(len(change.baseline), "run")
        about = f"since the baseline ({n_runs}, the newest of {newest.header.started:%Y-%m-%d})"
        if change.blockers:
            reasons = ", ".join(map(str, change.blockers))
            self._console.print(f"{about}: not comparable: {reasons}")
            return
        others = ", ".join(map(str, change.differences)) or "the same software"
        self._console.print(f"{about}: {others}; the machine is the same")
        found_then = describe_setup(newest)
        # The file may have changed, too.
        if found_then != describe_setup(run):
            self._console.print(f"  then     {found_then}")
        rows = []
        for part, row in change.parts.iterrows():
            ends = f"[{100 * row['low']:.0f}, {100 * row['high']:.0f}]"
            change_of_part = f"{100 * row['ratio']:.0f}% {ends} of the time then"
            rows.append((f"  {part}", change_of_part, row["verdict"]))
        print_table(rows, console=self._console)
        if len(change.baseline) < MIN_RUNS:
            self._console.print(
                f"undecided: `--save` {MIN_RUNS} runs, at different hours, to show how much this"
                " machine varies by itself"
            )


def _print_step(console: Any, run: Run) -> None:
    """Print what the setup returned, and what a step costs."""
    results = run.results()
    console.print(f"found    {describe_setup(run)}")
    parts = lab.parts(results).to_dict("records")
    # The last row is the step, the sum of the others.
    step = parts.pop()
    console.print(f"step     {format_seconds(step['seconds'])} {_interval(step)}")
    rows = [(f"  {row['part']}", row["seconds"], row["of_step_percent"], "") for row in parts]
    for row in lab.lines(results).to_dict("records"):
        unused = "no gradient comes from it" if row["unused_s"] else ""
        rows.append((f"  {row['line']}", row["seconds"], row["of_step_percent"], unused))
    print_table(
        [(name, format_seconds(time), f"{share:.0f}%", note) for name, time, share, note in rows],
        console=console,
    )
    for row in lab.speed(results).to_dict("records"):
        rate = f"{format_flops(row['flops_per_s'])}/s"
        console.print(f"speed    {rate}, {row['mfu_percent']:.0f}% of this machine's matmuls")
    memory = lab.memory(results)
    if len(memory):
        largest = memory.iloc[0]
        peak = format_bytes(largest["peak_bytes"])
        held = f"{largest['holder']}, {largest['of_peak_percent']:.0f}%"
        console.print(f"memory   peak {peak}; most: {held}")


def _print_arguments(console: Any, run: Run) -> None:
    """Print seconds per sample by value of a swept argument, and the largest batch that fits."""
    results = run.results()
    for row in fits(results).to_dict("records"):
        largest = f"at most {row['largest_batch']:,.0f} fit"
        if row["is_all_data"]:
            largest = f"all {row['largest_batch']:,.0f} samples of the data set fit"
        sample = format_bytes(row["sample_bytes"])
        available = format_bytes(row["available_bytes"])
        console.print(f"batch    {largest}, counted: {sample} per sample, {available} available")
    rows = [
        (
            f"  {row['argument']}",
            f"{format_seconds(row['seconds'])} per sample",
            _interval(row),
        )
        for row in argument_times(results).to_dict("records")
    ]
    if rows:
        console.print("values, in turns, the fastest per sample first:")
    print_table(rows, console=console)


def _print_ranks(console: Any, run: Run) -> None:
    """Print what each strategy does on several ranks, and which rank is late."""
    results = run.results()
    refused = results.rows(["reason", "strategy"], sweep="ranks", status="refused")
    # Without a strategy: the training cannot run on several ranks at all.
    for reason in refused[refused["strategy"].isna()]["reason"].unique():
        console.print(f"ranks    not measured: {reason}")
    rows = []
    for row in scaling(results).to_dict("records"):
        # A step less the same without communication: noise may make it negative.
        exposed = "nothing exposed"
        if row["exposed_s"] > 0:
            exposed = f"{format_seconds(row['exposed_s'])} exposed, {row['exposed_percent']:.0f}%"
        rows.append(
            (
                f"  {lab.LAB.names[row['strategy']]}",
                format_seconds(row["seconds"]),
                f"{row['times_one_process']:.2f}x one process",
                exposed,
                f"holds {format_bytes(row['held_bytes'])}",
            )
        )
    if rows:
        n_ranks = results.frame["world_size"].max()
        console.print(f"{n_ranks:.0f} ranks, checked against one process on the batches of all:")
    print_table(rows, console=console)
    for row in lateness(results).query("is_late").to_dict("records"):
        later = f"{format_seconds(row['later_s'])} {_interval(row)} longer than the others"
        console.print(f"late     rank {row['rank']}: {later}, in {row['part']}")


def _interval(row: Mapping[str, Any]) -> str:
    return f"[{format_seconds(row['low'])}, {format_seconds(row['high'])}]"


def describe_setup(run: Run) -> str:
    """Say what the setup returned: "GPT, 4.9M parameters; batch 8 x 128; AdamW; ..."."""
    setup = lab.found(run.results()).iloc[0]
    optimizer = str(setup["optimizer"])
    if not setup["has_own_optimizer"]:
        optimizer += " (the setup has none)"
    batches = str(setup["batches"])
    if batches == "DataLoader":
        workers = int(setup["loader_workers"])
        batches += f" with {workers} workers" if workers else " without workers"
    # Small models in parameters: 0.0052M would be read twice.
    n_parameters = int(setup["n_parameters"])
    size = f"{n_parameters / 1e6:.3g}M" if n_parameters >= 100_000 else f"{n_parameters:,}"
    words = [
        f"{setup['model']}, {size} parameters",
        f"batch {setup['batch_shape']}",
        optimizer,
        batches,
    ]
    if setup["without_gradient"]:
        words.append(f"no gradient reaches {setup['without_gradient']}")
    return "; ".join(words)
