"""This machine: what its own runs recommend, topic by topic, joined into one configuration of a training step.

A recommendation is the alternative that was significantly faster than the default in the newest run of a lab here, on
the model asked for, or on the one nearest in size that the lab measured.
"""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from labkit.bench.statistics import judged
from labkit.costs.transformer import SIZES, n_parameters
from labkit.lab.project import recorded_directory, runs_directory
from labkit.lab.rows import Measured, select
from labkit.lab.runs.store import Run, RunFileError
from labkit.machine import Machine, describe_machine

WHOLE_STEP = ("forward", "backward", "optimizer")
FARTHEST = 2.0
"""By this factor the length of a sequence may differ from a measured one for its result to be taken over."""
JOINED = Measured(("model", "world_size"), "implementation")
"""What the lab `this_machine` measures; its baseline is "default"."""


@dataclass(frozen=True)
class Configuration:
    """How a step is trained. The defaults are what somebody has who changes nothing."""

    precision: str = "float32"
    attention: str = "explicit"
    compiled: bool = False
    wrapper: str = "torch"
    bucket_mb: float | None = None


DEFAULT = Configuration()


@dataclass(frozen=True)
class Recommendation:
    """A field of `Configuration`, the value to take, and the comparison behind it: time over that of the default.

    `why` says what was compared, or why the default stays. The ratio is 1 where it does.
    """

    topic: str
    lab: str
    value: object
    why: str
    ratio: float = 1.0
    low: float = 1.0
    high: float = 1.0
    share: float = 1.0
    """Of the default's step, what the ratio is of."""

    @property
    def step_ratio(self) -> float:
        return 1 - self.share * (1 - self.ratio)


@dataclass(frozen=True)
class _Topic:
    """A field of `Configuration`: the lab that knows, and its ratios over the default; the column that has values."""

    field: str
    lab: str
    ratios: Callable[[pd.DataFrame, str, int], pd.DataFrame]
    column: str
    value: Callable[[object], object] = lambda value: value


def newest_runs(machine: Machine | None = None, labs: Container[str] | None = None) -> dict[str, Run]:
    """By lab, of `labs` (None: those in `LABS`), the newest run of this machine that holds anything."""
    here = machine or describe_machine()
    found: dict[str, Run] = {}
    for path in sorted(_run_files(), key=lambda path: path.name, reverse=True):
        lab = path.parent.name
        if lab in found or lab not in (LABS if labs is None else labs):
            continue
        try:
            run = Run.load(path)
        except (RunFileError, OSError):
            continue
        theirs = run.header.machine
        if (theirs.host, theirs.label) == (here.host, here.label) and not run.frame().empty:
            found[lab] = run
    return found


def _run_files() -> Iterable[Path]:
    return (path for folder in (runs_directory(), recorded_directory()) for path in folder.glob("*/*.jsonl"))


def recommendations(model: str, context_length: int, runs: Mapping[str, Run]) -> list[Recommendation]:
    """One for each field of `Configuration`, in its order."""
    return [_recommendation(topic, model, context_length, runs) for topic in _TOPICS]


def configuration(found: Sequence[Recommendation]) -> Configuration:
    return Configuration(**{one.topic: one.value for one in found})  # type: ignore[arg-type]


def expected_ratio(found: Sequence[Recommendation], *, compute_share: float = 1.0) -> float:
    """Time of the joined configuration over the default's, from what was measured of each part alone.

    What works on compute multiplies, on `compute_share` of the default's step; what works on communication takes its
    share off the rest, which it cannot make negative.
    """
    computing, saved = compute_share, 0.0
    for one in found:
        if one.topic in ("wrapper", "bucket_mb"):
            saved += 1 - one.step_ratio
        else:
            computing *= one.step_ratio
    return computing + max(1 - compute_share - saved, 0.0)


def compute_share(model: str, runs: Mapping[str, Run]) -> float:
    """A step without communication over one under torch's wrapper, on two ranks; 1 where no run says."""
    run = runs.get("data_parallel")
    if run is None:
        return 1.0
    ratios = _wrapper_ratios(run.frame(), model)
    alone = ratios.loc[ratios["implementation"] == "local", "ratio"]
    return min(float(alone.iloc[0]), 1.0) if len(alone) else 1.0


def _recommendation(topic: _Topic, model: str, context_length: int, runs: Mapping[str, Run]) -> Recommendation:
    default = getattr(DEFAULT, topic.field)
    run = runs.get(topic.lab)
    if run is None:
        return Recommendation(topic.field, topic.lab, default, f"not measured here: labkit report {topic.lab}")
    ratios = topic.ratios(run.frame(), model, context_length)
    if ratios.empty:
        return Recommendation(topic.field, topic.lab, default, "its run has nothing comparable")
    table = judged(ratios)
    faster = table[table["verdict"] == "faster"]
    if faster.empty:
        return Recommendation(topic.field, topic.lab, default, "nothing was significantly faster")
    best = faster.loc[faster["ratio"].idxmin()]
    where = ", ".join(str(best[name]) for name in table.columns[: list(table.columns).index(topic.column)])
    return Recommendation(
        *(topic.field, topic.lab, topic.value(best[topic.column]), f"measured on {where}"),
        *(float(best["ratio"]), float(best["low"]), float(best["high"])),
        share=_passes_share(runs, model) if topic.field == "precision" else 1.0,
    )


def _passes_share(runs: Mapping[str, Run], model: str) -> float:
    """Forward and backward of a whole step, the rest being the optimizer's; 1 where no run says."""
    run = runs.get("end_to_end")
    if run is None:
        return 1.0
    medians = Measured(("size",), "phase").medians(run.frame(), sweep="phases", phase=list(WHOLE_STEP))
    step = _nearest_model(medians, "size", model).set_index("phase")["seconds"]
    return float(1 - step["optimizer"] / step.sum()) if set(WHOLE_STEP) <= set(step.index) else 1.0


def _nearest_model(ratios: pd.DataFrame, column: str, model: str) -> pd.DataFrame:
    """The rows of the measured model that is nearest in size; only Transformers are comparable."""
    known = [name for name in ratios[column].unique() if name in SIZES]
    if not known:
        return ratios.iloc[:0]

    def apart(name: str) -> float:
        factor = n_parameters(SIZES[name]) / n_parameters(SIZES[model])
        return max(factor, 1 / factor)

    return ratios[ratios[column] == min(known, key=apart)]


def _precision(frame: pd.DataFrame, model: str, _: int) -> pd.DataFrame:
    measured = Measured(("model",), "alternative")
    return _nearest_model(measured.over(frame, "float32", part="speed", mode="forward and backward"), "model", model)


def _compiled(frame: pd.DataFrame, model: str, _: int) -> pd.DataFrame:
    measured = Measured(("size",), "implementation")
    return _nearest_model(measured.over(frame, "eager", sweep="compile", phase="step"), "size", model)


def _attention(frame: pd.DataFrame, _: str, context_length: int) -> pd.DataFrame:
    """Forward and backward together, at the sequence nearest to the one asked for."""
    rows = select(frame, ["head_dim", "implementation"], sweep="grid", phase=["forward", "backward"], dtype="float32")
    rows = rows[rows["head_dim"] == rows["head_dim"].max()]
    near = [length for length in rows["sequence"].unique() if 1 / FARTHEST <= length / context_length <= FARTHEST]
    if not near:
        return pd.DataFrame(columns=["ratio", "p"])
    length = min(near, key=lambda one: abs(one - context_length))
    whole = _summed(rows[rows["sequence"] == length], ["sequence", "implementation"])
    return Measured(("sequence",), "implementation").over(whole, "explicit")


def _wrapper(frame: pd.DataFrame, model: str, _: int) -> pd.DataFrame:
    ratios = _wrapper_ratios(frame, model)
    return ratios[ratios["implementation"] != "local"]


def _wrapper_ratios(frame: pd.DataFrame, model: str) -> pd.DataFrame:
    """Steps under each wrapper over those under torch's; "local" is without any."""
    rows = select(frame, ["workload", "implementation"], sweep="implementations", phase=list(WHOLE_STEP))
    whole = _summed(rows, ["workload", "world_size", "implementation"])
    return _nearest_model(
        Measured(("workload", "world_size"), "implementation").over(whole, "torch"), "workload", model
    )


def _bucket(frame: pd.DataFrame, model: str, _: int) -> pd.DataFrame:
    """Sizes over the default one, which is written as 0 here: nothing equals nan."""
    rows = select(frame, ["workload", "of_bucket_mb"], sweep="buckets", phase=list(WHOLE_STEP))
    whole = _summed(
        rows.assign(of_bucket_mb=rows["of_bucket_mb"].fillna(0.0)),
        ["workload", "implementation", "point", "of_bucket_mb"],
    )
    ratios = Measured(("workload", "implementation", "point"), "of_bucket_mb").over(whole, 0.0)
    return _nearest_model(ratios, "workload", model)


def _summed(rows: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """Phases of a repeat added up; a repeat without one of them is left out."""
    keys = [*by, "rank", "repeat"]
    whole = rows.groupby(keys, dropna=False)["seconds"].agg(["sum", "count"]).reset_index()
    return whole[whole["count"] == whole["count"].max()].rename(columns={"sum": "seconds"}) if len(whole) else whole


_TOPICS = (
    _Topic("precision", "precision", _precision, "alternative"),
    _Topic("attention", "attention", _attention, "implementation"),
    _Topic("compiled", "end_to_end", _compiled, "implementation", lambda value: value == "compiled"),
    _Topic("wrapper", "data_parallel", _wrapper, "implementation"),
    _Topic("bucket_mb", "data_parallel", _bucket, "of_bucket_mb", lambda value: float(str(value))),
)
LABS = frozenset({topic.lab for topic in _TOPICS} | {"this_machine"})
"""Those whose runs recommend something, and the one that measured it together."""
