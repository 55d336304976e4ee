"""This machine: what its own runs recommend, topic by topic, joined into one configuration of a training step.

A recommendation is an alternative that was significantly faster than the default in the newest run of a lab here, on
the model asked for, or on the one nearest in size that the lab measured. It is the one that wins in all settings of the
lab, as the lab's own answer and the index say, unless another is clearly faster in that nearest one.
"""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from labkit.bench.statistics import with_verdicts
from labkit.costs.transformer import SIZES, n_parameters
from labkit.lab.comparing import winner_of
from labkit.lab.project import recorded_directory, runs_directory
from labkit.lab.rows import Measured, select, summed
from labkit.lab.runs.store import Run, RunFileError
from labkit.machine import Machine, describe_machine
from labkit.nn.attention_implementations import RESERVED
from labkit.parallel.data_parallel.implementations import OWN_NAMES

WHOLE_STEP = ("forward", "backward", "optimizer")
WRAPPERS, OF_STEP = Measured(("workload", "world_size"), "implementation"), "_of_step"
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
OF_RANKS = ("wrapper", "bucket_mb")
"""Fields that mean nothing on one rank."""


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
    """A field of `Configuration`, the lab that knows, and its ratios over the default in all settings.

    `setting` is the column of what a setting is near in, the model or "sequence"; `column` has the values.
    """

    field: str
    lab: str
    ratios: Callable[[pd.DataFrame], pd.DataFrame]
    setting: str
    column: str
    value: Callable[[object], object] = lambda value: value

    def nearest(self, ratios: pd.DataFrame, model: str, context_length: int) -> pd.DataFrame:
        if self.setting == "sequence":
            return _nearest_sequence(ratios, context_length)
        return _nearest_model(ratios, self.setting, model)


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
        if run.header.machine.identity == here.identity and not run.frame().empty:
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
        if one.topic in OF_RANKS:
            saved += 1 - one.step_ratio
        else:
            computing *= one.step_ratio
    return computing + max(1 - compute_share - saved, 0.0)


def compute_share(model: str, runs: Mapping[str, Run]) -> float:
    """A step without communication over one under torch's wrapper, on two ranks; 1 where no run says."""
    run = runs.get("data_parallel")
    if run is None:
        return 1.0
    ratios = _nearest_model(_wrapper_ratios(run.frame()), "workload", model)
    alone = ratios.loc[ratios["implementation"] == "local", "ratio"]
    return min(float(alone.iloc[0]), 1.0) if len(alone) else 1.0


def _recommendation(topic: _Topic, model: str, context_length: int, runs: Mapping[str, Run]) -> Recommendation:
    default = getattr(DEFAULT, topic.field)
    run = runs.get(topic.lab)
    if run is None:
        return Recommendation(topic.field, topic.lab, default, f"not measured here: labkit report {topic.lab}")
    ratios = topic.ratios(run.frame())
    near = topic.nearest(ratios, model, context_length)
    if near.empty:
        return Recommendation(topic.field, topic.lab, default, "its run has nothing comparable")
    best, why = _choice(with_verdicts(ratios), near.index, topic.column)
    if best is None:
        return Recommendation(topic.field, topic.lab, default, why)
    gain = [f"{name}{OF_STEP}" if f"ratio{OF_STEP}" in best else name for name in ("ratio", "low", "high")]
    return Recommendation(
        *(topic.field, topic.lab, topic.value(best[topic.column]), why),
        *(float(best[gain[0]]), float(best[gain[1]]), float(best[gain[2]])),
        share=_passes_share(runs, model) if topic.field == "precision" else 1.0,
    )


def _choice(table: pd.DataFrame, near: pd.Index, column: str) -> tuple[pd.Series | None, str]:
    """The row of the alternative to take, of those near, and why; None where nothing is faster there.

    What wins over all of the lab's settings is taken if it is about as fast as the fastest here: both intervals meet.
    """
    here = table.loc[near]
    faster = here[here["verdict"] == "faster"]
    if faster.empty:
        return None, "nothing was significantly faster"
    best, winner = faster.loc[faster["ratio"].idxmin()], winner_of(table, column)
    setting = list(table.columns[: list(table.columns).index(column)])
    where = ", ".join(str(best[name]) for name in setting)
    if winner == best[column]:
        return best, f"measured on {where}"
    same = (faster[setting] == best[setting]).all(axis=1)
    alike = faster[same & (faster[column] == winner) & (faster["low"] <= best["high"])]
    if alike.empty:
        return best, f"measured on {where}; over all settings {winner} wins, but not there"
    fastest = alike.loc[alike["ratio"].idxmin()]
    return fastest, f"measured on {where}, where {best[column]} is as fast; over all settings this wins"


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


def _nearest_sequence(ratios: pd.DataFrame, length: int) -> pd.DataFrame:
    """The rows of the nearest sequence, if it is at most `FARTHEST` times as long or short."""
    near = [one for one in ratios.get("sequence", []) if 1 / FARTHEST <= one / length <= FARTHEST]
    return ratios[ratios["sequence"] == min(near, key=lambda one: abs(one - length))] if near else ratios.iloc[:0]


def _precision(frame: pd.DataFrame) -> pd.DataFrame:
    return Measured(("model",), "alternative").over(frame, "float32", part="speed", mode="forward and backward")


def _compiled(frame: pd.DataFrame) -> pd.DataFrame:
    return Measured(("size",), "implementation").over(frame, "eager", sweep="compile", phase="step")


def _attention(frame: pd.DataFrame) -> pd.DataFrame:
    """Forward and backward together, of the longest heads."""
    rows = select(frame, ["head_dim", "implementation"], sweep="grid", phase=["forward", "backward"], dtype="float32")
    rows = rows[rows["implementation"].isin(RESERVED) & (rows["head_dim"] == rows["head_dim"].max())]
    whole = summed(rows, "phase", WHOLE_STEP[:2], "both", ("sequence", "implementation"))
    return Measured(("sequence",), "implementation").over(whole, "explicit")


def _wrapper(frame: pd.DataFrame) -> pd.DataFrame:
    """Chosen by backward, as the lab's own answer is: there a wrapper works. What it gains is of the step."""
    rows = select(frame, ["workload", "implementation"], sweep="implementations", phase="backward")
    ratios = WRAPPERS.over(rows[rows["implementation"] != "local"], "torch")
    ratios = ratios[ratios["implementation"].isin(OWN_NAMES)]  # not a reader's own: it cannot be named elsewhere
    keys = list(WRAPPERS.columns)
    of_step = _wrapper_ratios(frame)[[*keys, "ratio", "low", "high"]]
    return ratios.merge(of_step, how="left", on=keys, suffixes=("", OF_STEP))


def _wrapper_ratios(frame: pd.DataFrame) -> pd.DataFrame:
    """Steps under each wrapper over those under torch's; "local" is without any."""
    rows = select(frame, ["workload", "implementation"], sweep="implementations", phase=list(WHOLE_STEP))
    return WRAPPERS.over(summed(rows, "phase", WHOLE_STEP, "step", WRAPPERS.columns), "torch")


def _bucket(frame: pd.DataFrame) -> pd.DataFrame:
    """Sizes over the default one, which is written as 0 here: nothing equals nan."""
    by = ["workload", "implementation", "point", "of_bucket_mb"]
    rows = select(frame, by, sweep="buckets", phase=list(WHOLE_STEP))
    whole = summed(rows.assign(of_bucket_mb=rows["of_bucket_mb"].fillna(0.0)), "phase", WHOLE_STEP, "step", by)
    return Measured(("workload", "implementation", "point"), "of_bucket_mb").over(whole, 0.0)


_TOPICS = (
    _Topic("precision", "precision", _precision, "model", "alternative"),
    _Topic("attention", "attention", _attention, "sequence", "implementation"),
    _Topic("compiled", "end_to_end", _compiled, "size", "implementation", lambda value: value == "compiled"),
    _Topic("wrapper", "data_parallel", _wrapper, "workload", "implementation"),
    _Topic("bucket_mb", "data_parallel", _bucket, "workload", "of_bucket_mb", lambda value: float(str(value))),
)
LABS = frozenset({topic.lab for topic in _TOPICS} | {"this_machine"})
"""Those whose runs recommend something, and the one that measured it together."""
