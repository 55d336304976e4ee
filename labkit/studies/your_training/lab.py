"""Your own training: what its step costs, where its time goes, and what each change would gain."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import pandas as pd

from labkit.lab.answers import Compare, Report
from labkit.lab.config import ParameterError, Seconds, SeveralRanks, TimedConfig, one_of
from labkit.lab.declaration import Lab, Say
from labkit.lab.figures import Bars
from labkit.lab.metric import Metric, Results
from labkit.machine.description import Machine
from labkit.nn.training import BACKWARD, FORWARD
from labkit.parallel.data_parallel import TORCH
from labkit.parallel.ranks.torchrun import ranks_here
from labkit.studies.shared import sharding_strategies
from labkit.studies.shared.tables import WRAPPER_NAMES, in_order
from labkit.studies.your_training.changes import CHANGES
from labkit.studies.your_training.gains import CHANGE
from labkit.studies.your_training.loop import PARTS
from labkit.studies.your_training.rank_tables import STRATEGY, scaling
from labkit.studies.your_training.setup import SetupError, absolute_target, setup_file
from labkit.studies.your_training.worker import STEP, TOGETHER, YOURS, YourTrainingPoint, measure

ChangeName = Annotated[str, one_of(lambda: CHANGES)]


class YourTrainingConfig(TimedConfig):
    file: str | None = None
    """ "train.py:setup": a file and its function. None: the notebook's function."""
    arguments: dict[str, Any] = {}
    """Arguments of the setup, for example {"batch": 16}."""
    argument: str | None = None
    """An argument whose `values` are compared, in turns."""
    values: list[bool | int | float | str | None] = []
    """Of `argument`. None, with `batch`: around the setup's default, up to what fits."""
    changes: list[ChangeName] = list(CHANGES)
    """Changes to try, each in turns with the training as it is."""
    world_sizes: list[SeveralRanks] = [2]
    """Numbers of ranks on which wrappers and stages of ZeRO are tried."""
    rounds_s: Seconds | None = 5.0


def points(config: YourTrainingConfig, machine: Machine) -> Iterator[YourTrainingPoint]:
    """Plan the step, its changes, values of an argument, and ranks."""
    shared: dict[str, Any] = {
        "file": absolute_target(config.file) if config.file else "",
        "arguments": tuple(sorted(config.arguments.items())),
    }
    # No changes in the others: a point's time is planned by them.
    yield YourTrainingPoint.of(config, sweep="step", changes=(), **shared)
    if config.changes:
        yield YourTrainingPoint.of(config, sweep="changes", **shared)
    if config.argument:
        swept = {"swept": config.argument, "swept_values": tuple(config.values)}
        yield YourTrainingPoint.of(config, sweep="argument", changes=(), **swept, **shared)
    for world_size in config.world_sizes:
        backend = machine.backend(machine.device("auto"), ranks_here(world_size))
        ranks = {"world_size": world_size, "backend": backend}
        yield YourTrainingPoint.of(config, sweep="ranks", changes=(), **ranks, **shared)


def _expect_file(config: YourTrainingConfig, say: Say) -> None:
    """ParameterError without a file that exists; a notebook's setup comes with `lab_on`."""
    if config.file is None:
        raise ParameterError("expected a setup: --set file=train.py:setup, or the notebook's cell")
    try:
        setup_file(absolute_target(config.file))
    except SetupError as error:
        raise ParameterError(str(error)) from None


def _example(results: Results) -> str | None:
    """Name the notebook's setup, which may be its example; None for a file of the reader's."""
    is_of_notebook = len(results.rows(["file"], kind="found", file="")) > 0
    return "the setup in the notebook's first cell" if is_of_notebook else None


PART = Metric("seconds", "part", (), where={"kind": "part"})
# Share of a step below which a line is not worth a row.
MIN_LINE_SHARE = 0.03
MAX_LINES = 5
MAX_HOLDERS = 8

FOUND = ["model", "n_parameters", "dtype", "device", "batch_shape", "optimizer"]
FOUND += ["has_own_optimizer", "batches", "loader_workers", "without_gradient", "flops"]


def found(results: Results) -> pd.DataFrame:
    """Return what was found in the setup, in one row; none if it was refused.

    `without_gradient`: parameters that the loss does not depend on, by name. `flops`: of matmuls,
    convolutions and attention, in a forward and a backward pass.
    """
    return results.rows(FOUND, kind="found")


def parts(results: Results) -> pd.DataFrame:
    """Return medians and shares of the parts of a step, in order, and of the whole."""
    table = in_order(PART.medians(results.frame), "part", (*PARTS, STEP))
    step_s = table.loc[table["part"] == STEP, "seconds"].sum()
    return table.assign(of_step_percent=100 * table["seconds"] / step_s)


def lines(results: Results) -> pd.DataFrame:
    """Return the reader's lines that take most of a step, the slowest first.

    `seconds` has the line itself and its operators' backward pass (`backward_s`). `calls` are
    operators per step. `unused_s`: of a line from which no gradient comes, with all that it calls.
    """
    columns = ["line", "seconds", "backward_s", "of_step_percent", "calls", "unused_s"]
    shares = [f"{part}_share" for part in PARTS]
    rows = results.rows(["line", *shares, "calls", "unused_share"], kind="line")
    # Parts were timed without a look at their stacks, which slows some more than others.
    seconds = parts(results).set_index("part")["seconds"].reindex([*PARTS, STEP])
    rows["backward_s"] = rows["backward_share"] * seconds[BACKWARD]
    rows["unused_s"] = rows["unused_share"] * seconds[FORWARD]
    rows["seconds"] = rows[shares].astype(float).to_numpy() @ seconds[[*PARTS]].to_numpy()
    rows["of_step_percent"] = 100 * rows["seconds"] / seconds[STEP]
    is_large = rows[["seconds", "unused_s"]].max(axis=1) > MIN_LINE_SHARE * seconds[STEP]
    rows = rows.loc[is_large, columns].sort_values("seconds", ascending=False)
    return rows.head(MAX_LINES).reset_index(drop=True)


def speed(results: Results) -> pd.DataFrame:
    """Return the FLOPs of a step, and its share of the rate that matmuls reach on this machine.

    Empty without matmuls, convolutions and attention, and without a calibration.
    """
    table = found(results)[["flops"]]
    table["seconds"] = parts(results).query("part == @STEP")["seconds"].median()
    table["flops_per_s"] = table["flops"] / table["seconds"]
    table["matmul_flops_per_s"] = _best_matmul_rate(results)
    table["mfu_percent"] = 100 * table["flops_per_s"] / table["matmul_flops_per_s"]
    return table[table["flops"] > 0].dropna()


def _best_matmul_rate(results: Results) -> float:
    """Return FLOP/s of the fastest matmul in the model's dtype on its device; NaN if unknown."""
    rows = found(results)
    if rows.empty or results.calibration is None:
        return math.nan
    training = rows.iloc[0]
    rates = results.calibration.rates_on(training["device"].partition(":")[0])
    if rates is None:
        return math.nan
    curve = rates.products.get(training["dtype"], ())
    return max((flops / seconds for flops, seconds in curve), default=math.nan)


def memory(results: Results) -> pd.DataFrame:
    """Return what holds memory at a step's peak: parameters, states and lines, largest first."""
    rows = results.rows(["holder", "held_bytes", "peak_bytes"], kind="memory")
    rows = rows.assign(of_peak_percent=100 * rows["held_bytes"] / rows["peak_bytes"])
    rows = rows.sort_values("held_bytes", ascending=False, ignore_index=True)
    # What a page would round to 0.
    return rows[rows["of_peak_percent"] >= 0.1].head(MAX_HOLDERS)


LAB = Lab(
    name="your_training",
    title="Your own training",
    summary="What a step of your own training costs, and what each change to it would gain.",
    config=YourTrainingConfig,
    smoke={
        "changes": ["fused optimizer", "autocast to bfloat16"],
        "world_sizes": [],
        "rounds_s": 0.5,
    },
    on_gpu={"world_sizes": [2]},  # up to the number of GPUs
    preload=("torch._inductor.compile_fx",),
    worker=measure,
    points=points,
    prepare=_expect_file,
    example=_example,
    alternatives=("change", "strategy", "attention"),
    names={
        YOURS: "your training",
        TOGETHER: "the combination",
        **WRAPPER_NAMES,
        **sharding_strategies.NAMES,
        **{name: change.title for name, change in CHANGES.items()},
    },
    questions=[
        Report(
            id="step",
            text="What does a step cost, and which part takes most of it?",
            table=parts,
            pick=lambda table: table[table["part"] != STEP]["seconds"].idxmax(),
            says="The largest part of a step is {part}: {seconds}, {of_step_percent}%.",
            figure=Bars(source=lambda results: parts(results).iloc[:-1], x="part", y="seconds"),
        ),
        Report(
            id="lines",
            text="Which lines of the file take most of a step?",
            table=lines,
            pick=lambda table: table.index[0],
            says="In a step, `{line}` takes {seconds}, {of_step_percent}% of it.",
            figure=Bars(x="line", y="seconds"),
        ),
        Compare(
            id="changes",
            text="Which change makes a step faster?",
            metric=CHANGE,
            baseline=YOURS,
            among=[*CHANGES],
            noun="change",
            advice="Use {name}.",
            figure=Bars(x="change", y="ratio"),
        ),
        Compare(
            id="together",
            text="How much faster is a step with all changes that pay?",
            metric=CHANGE,
            baseline=YOURS,
            among=[TOGETHER],
            without_rows="With fewer than two changes that pay there is nothing to combine.",
        ),
        Report(
            id="memory",
            text="What holds the memory at the peak of a step?",
            table=memory,
            pick=lambda table: table.index[0],
            verdict="counted",
            says="Most of the memory at the peak: {holder}, {held_bytes} of {peak_bytes}.",
            figure=Bars(x="holder", y="held_bytes"),
        ),
        Report(
            id="speed",
            text="How near is a step to the rate that matmuls reach on this machine?",
            table=speed,
            says="{flops} per step are {flops_per_s}, {mfu_percent}% of this machine's matmuls.",
            needs_calibration=True,
        ),
        Compare(
            id="ranks",
            text="On several ranks, which wrapper or stage of ZeRO makes a step faster?",
            metric=STRATEGY,
            baseline=TORCH,
            noun="wrapper",
            advice="On several ranks, train with {name}.",
            figure=Bars(x="strategy", y="ratio", panel="world_size"),
        ),
        Report(
            id="scaling",
            text="How much more do several ranks process, and what communication is exposed?",
            table=scaling,
            pick=lambda table: table.index[0],
            configuration=("world_size",),
            says=(
                "With {strategy}, {world_size} ranks process {times_one_process} times as much as"
                " one process; {exposed_percent}% of a step is exposed communication."
            ),
            figure=Bars(x="strategy", y="exposed_s", panel="world_size"),
        ),
    ],
)


def lab_on(setup: Callable[..., Any]) -> Lab:
    """Return this lab on a setup of a notebook, which is sent to the rank."""
    return replace(LAB, worker=partial(measure, setup=setup), prepare=lambda config, say: None)
