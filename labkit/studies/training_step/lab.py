"""A training step: what it costs part by part, where the time goes, and what warm-up and
`torch.compile` change."""

from collections.abc import Iterator
from itertools import product
from typing import Annotated, Any, Literal

import pandas as pd

from labkit.bench.kernel_names import FAMILIES
from labkit.costs.transformer import SIZES, backward_flops, forward_flops
from labkit.lab.answers import Check, Compare, Report
from labkit.lab.config import Count, DeviceConfig, Repeats, Seconds, Some, one_of
from labkit.lab.declaration import Lab
from labkit.lab.figures import Bars, Lines
from labkit.lab.metric import Metric, Results
from labkit.machine.description import Machine
from labkit.nn.training import BACKWARD, FORWARD, OPTIMIZER
from labkit.studies.shared.tables import in_order
from labkit.studies.training_step import worker
from labkit.studies.training_step.worker import TrainingStepPoint

Size = Annotated[str, one_of(lambda: SIZES)]
# Timed part -> the phases that it adds up.
PHASES = {
    worker.INFERENCE: (worker.INFERENCE,),
    FORWARD: (FORWARD,),
    BACKWARD: (BACKWARD,),
    worker.FORWARD_BACKWARD: (FORWARD, BACKWARD),
    OPTIMIZER: (OPTIMIZER,),
    worker.STEP: (FORWARD, BACKWARD, OPTIMIZER),
}


class TrainingStepConfig(DeviceConfig):
    sizes: Some[Size] = ["nano", "mini"]
    """Models whose phases are timed."""
    profiled_sizes: list[Size] = ["nano", "mini"]
    compiled_sizes: list[Size] = ["nano"]
    first_step_sizes: list[Size] = ["nano"]
    """Models whose first steps are timed, in new processes."""
    processes: Repeats = 6
    """New processes whose first steps are timed. Fewer than six give no interval, and so no
    verdict."""
    precisions: Some[Literal["float32", "bfloat16"]] = ["float32"]
    batch: Count = 2
    context_length: Count = 64
    repeats: Repeats = 15
    rounds_s: Seconds | None = 2.0


CONFIGURATION = ("device", "precision", "size", "batch", "context_length")
TIME = Metric("seconds", "phase", CONFIGURATION, where={"sweep": "phases"})
FIRST_STEP = Metric(
    "seconds",
    "which",
    CONFIGURATION,
    where={"sweep": "first"},
    prepare=lambda rows: rows.assign(repeat=rows["trial"]),
)
COMPILE = Metric("seconds", "implementation", CONFIGURATION, where={"sweep": "compile"})
OPERATORS = Metric(
    "self_s",
    "operator",
    (*CONFIGURATION, "profiled", "phase", "family"),
    where={"sweep": "profile"},
)
# Kind of pass in the table of shares -> the profiled action and its phases. One profile of a step
# serves both kinds with a backward pass.
VIEWS = {
    worker.INFERENCE: (worker.INFERENCE, (FORWARD, "")),
    worker.FORWARD_BACKWARD: (worker.STEP, (FORWARD, BACKWARD)),
    worker.STEP: (worker.STEP, (FORWARD, BACKWARD, OPTIMIZER, "")),
}


def points(config: TrainingStepConfig, machine: Machine) -> Iterator[TrainingStepPoint]:
    """Plan the phases of all models, then first steps, compiled steps and profiles."""
    device = machine.device(config.device)

    def point(sweep: str, size: str, precision: str = "float32", **more: Any) -> TrainingStepPoint:
        return TrainingStepPoint.of(
            config, sweep=sweep, size=size, precision=precision, device=device, **more
        )

    for precision, size in product(config.precisions, config.sizes):
        yield point("phases", size, precision)
    # A process has one first step, so each trial is a point with processes of its own.
    for size, trial in product(config.first_step_sizes, range(config.processes)):
        yield point("first", size, trial=trial, fresh_ranks=True)
    for precision, size in product(config.precisions, config.compiled_sizes):
        yield point("compile", size, precision)
    for size in config.profiled_sizes:
        yield point("profile", size)


def step_times(results: Results) -> pd.DataFrame:
    """Return medians by model and phase, the share of the step, and the FLOP/s of its matmuls."""
    table = TIME.medians(results.frame)
    table["step_s"] = table["seconds"].where(table["phase"] == worker.STEP)
    # The step's row has the only number of its configuration.
    step_s = table.groupby(list(CONFIGURATION))["step_s"].transform("max")
    flops = [_count_flops(row) for row in table.to_dict("records")]
    rate = pd.Series(flops, index=table.index, dtype=float) / table["seconds"]
    table = table.drop(columns="step_s").assign(
        of_step_percent=100 * table["seconds"] / step_s,
        # The optimizer has no matmuls, and so no rate.
        flops_per_s=rate.where(rate > 0),
    )
    return in_order(table, "size", SIZES)


def _count_flops(row: dict[str, Any]) -> int:
    """Return the FLOPs of the matmuls of a phase."""
    shape = SIZES[row["size"]]
    sizes = (int(row["batch"]), int(row["context_length"]))
    flops = 0
    for phase in PHASES[row["phase"]]:
        if phase in (worker.INFERENCE, FORWARD):
            flops += sum(forward_flops(shape, *sizes).values())
        elif phase == BACKWARD:
            flops += sum(backward_flops(shape, *sizes).values())
    return flops


def predictions(results: Results) -> pd.DataFrame:
    """Measured times of each phase, and its operators' times at the machine's rates."""
    table = TIME.medians(results.frame)
    return table.assign(predicted_s=[_predict(row, results) for row in table.to_dict("records")])


def _predict(row: dict[str, Any], results: Results) -> float | None:
    calibration = results.calibration
    if calibration is None:
        return None
    rates = calibration.rates_on(row["device"])
    if rates is None:
        return None
    sizes = int(row["batch"]), int(row["context_length"])
    operators = worker.list_operators(SIZES[row["size"]], *sizes, row["precision"], row["device"])
    return worker.predict_seconds(rates, operators, PHASES[row["phase"]])


def shares(results: Results) -> pd.DataFrame:
    """Return the mean share of each family of operators or GPU kernels in each kind of pass."""
    rows = OPERATORS.select(results.frame).dropna(subset="self_s")
    if rows.empty:
        return rows.reindex(columns=["device", "size", "view", "family", "share_percent"])
    parts = [
        rows[(rows["profiled"] == profiled) & rows["phase"].isin(phases)].assign(view=view)
        for view, (profiled, phases) in VIEWS.items()
    ]
    keys = ["device", "size", "view"]
    groups = pd.concat(parts).groupby([*keys, "repeat", "family"], sort=False)
    sums = groups["self_s"].sum().reset_index()
    total = sums.groupby([*keys, "repeat"])["self_s"].transform("sum")
    table = sums.assign(share_percent=100 * sums["self_s"] / total)
    means = table.groupby([*keys, "family"], sort=False)["share_percent"].mean().reset_index()
    return in_order(means, "family", FAMILIES)


def matmul_shares(results: Results) -> pd.DataFrame:
    """Return one row per model and kind of pass: the percentage of each family."""
    wide = shares(results).pivot_table(
        index=["device", "size", "view"], columns="family", values="share_percent"
    )
    return wide.fillna(0.0).add_suffix("_percent").reset_index()


def top_operators(results: Results) -> pd.DataFrame:
    """Return the five operators that take most of a full step, by model."""
    rows = OPERATORS.select(results.frame)
    rows = rows[rows["profiled"] == worker.STEP]
    keys = ["device", "size", "operator"]
    if rows.empty:
        return rows[[*keys, "self_s"]]
    by_pass = rows.groupby([*keys, "repeat"])[["self_s", "calls"]].sum()
    sums = by_pass.groupby(keys).median().reset_index()
    return sums.sort_values(["size", "self_s"], ascending=False).groupby("size").head(5)


LAB = Lab(
    name="training_step",
    title="A training step",
    summary=(
        "What a training step costs part by part, where its time goes, and what torch.compile"
        " changes."
    ),
    config=TrainingStepConfig,
    # Compiling takes longer than all the rest of this profile.
    smoke={"compiled_sizes": [], "processes": 2},
    # As in data/reference/end_to_end.csv and transformer_compile.csv.
    paper={
        "sizes": ["small", "medium", "large", "xl", "2.7B"],
        "profiled_sizes": ["small", "medium", "large", "xl", "2.7B"],
        "compiled_sizes": ["small", "medium", "large", "xl"],
        "first_step_sizes": ["small", "medium", "large"],
        "batch": 4,
        "context_length": 128,
        "warmup": 5,
    },
    on_gpu={
        "sizes": ["small", "medium", "large"],
        "profiled_sizes": ["small"],
        "batch": 4,
        "context_length": 512,
    },
    preload=("torch._inductor.compile_fx",),
    worker=worker.measure,
    points=points,
    model_parameters=("sizes", "profiled_sizes", "compiled_sizes", "first_step_sizes"),
    # Only compiled steps have alternatives: elsewhere the sweep names what failed.
    alternatives=("implementation", "sweep"),
    names={
        worker.EAGER: "the eager one",
        worker.COMPILED: "a compiled step",
        worker.FIRST: "the first step of a process",
        worker.LATER: "a later step",
    },
    questions=[
        Report(
            id="step_times",
            text="How long does a training step take, and which part takes most of it?",
            table=step_times,
            # Of the largest model, which comes last.
            pick=lambda table: table.index[table["phase"] == BACKWARD][-1],
            configuration=CONFIGURATION,
            says=(
                "With {size}, the backward pass takes {seconds}, {of_step_percent}% of a training"
                " step."
            ),
            figure=Lines(x="size", y="seconds", hue="phase", log="y"),
        ),
        Report(
            id="shares",
            text="Where does the time go, by kind of operator or GPU kernel?",
            table=matmul_shares,
            configuration=("device", "size"),
            says="Matmuls take {matmul_percent}% of a {view} of {size}.",
            figure=Bars(
                source=shares, x="size", y="share_percent", hue="family", panel="view", stacked=True
            ),
        ),
        Check(
            id="predicted",
            needs_calibration=True,
            text=(
                "Do the machine's rates of matmuls, memory and calls predict how long each part"
                " takes?"
            ),
            table=predictions,
            measured="seconds",
            predicted="predicted_s",
            figure=Lines(x="size", y="measured_over_predicted", hue="phase", log="y"),
        ),
        Compare(
            id="compile",
            text="Is a step of the compiled model faster than an eager one?",
            metric=COMPILE,
            baseline=worker.EAGER,
            topic="compile",
            advice="Compile the model for long runs{where}: compiling takes as long as many steps.",
        ),
        Compare(
            id="first_step",
            is_expected=True,
            text="How much faster is a later step than a process's first one?",
            metric=FIRST_STEP,
            baseline=worker.FIRST,
        ),
    ],
)
