"""What this machine's own runs recommend, topic by topic, joined into one configuration of a training step.

A recommendation is an alternative that was significantly faster than the default in the newest run of a lab here, on
the model asked for or the measured one nearest in size. It is the alternative that is best in all of the lab's
configurations, unless that nearest one shows no gain for it.
"""

import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from labkit.costs.transformer import SIZES, n_parameters
from labkit.lab.columns import label
from labkit.lab.metric import Metric
from labkit.lab.project import recorded_directory, runs_directory
from labkit.lab.runs.store import Run, RunFileError
from labkit.machine import Machine, describe_machine

MAX_LENGTH_RATIO = 2.0  # by which a measured sequence may differ in length for its result to be taken over


@dataclass(frozen=True)
class Configuration:
    """How a step is trained. The defaults are those of a script that changes nothing."""

    precision: str = "float32"
    attention: str = "explicit"
    compiled: bool = False
    wrapper: str = "torch"


DEFAULT = Configuration()
RANK_FIELDS = ("wrapper",)
"""Fields that mean nothing on one rank."""


@dataclass(frozen=True)
class Recommendation:
    """A field of `Configuration`, the value to take, and the comparison behind it: time over that of the default."""

    topic: str
    lab: str
    value: object
    reason: str
    ratio: float = 1.0
    """1 if the default stays; `low` and `high` are its interval."""
    low: float = 1.0
    high: float = 1.0


@dataclass(frozen=True)
class _Topic:
    """A field of `Configuration`, and the metric of the lab that decides it."""

    field: str
    lab: str
    metric: Metric
    baseline: str
    near: str
    """The column in which the nearest configuration is looked for: a model, or "sequence"."""
    value: Callable[[Any], object] = str

    def recommend(self, frame: pd.DataFrame, model: str, context_length: int) -> Recommendation:
        default = getattr(DEFAULT, self.field)
        table = self.metric.ratios_to(self.baseline, frame)
        here = self._nearest(table, model, context_length)
        faster = here[here["verdict"] == "faster"]
        if faster.empty:
            return Recommendation(self.field, self.lab, default, "nothing was measured to be faster")
        best = faster[faster[self.metric.compare] == self.metric.best(table)]
        row = (best if len(best) else faster).sort_values("ratio").iloc[0]
        name, place = row[self.metric.compare], row[self.near]
        reason = f"{name} takes {row['ratio']:.2f} times as long as {self.baseline} with {label(self.near, place)}"
        bounds = (float(row[bound]) for bound in ("ratio", "low", "high"))
        return Recommendation(self.field, self.lab, self.value(name), reason, *bounds)

    def _nearest(self, table: pd.DataFrame, model: str, context_length: int) -> pd.DataFrame:
        """The rows of the configuration nearest to the model, or to the length of a sequence."""
        if self.near == "sequence":
            off = (table["sequence"].astype(float) / context_length).apply(math.log).abs()
            return table[(off == off.min()) & (off <= math.log(MAX_LENGTH_RATIO))]
        table = table[table[self.near].isin(SIZES)]
        size = n_parameters(SIZES[model])
        off = table[self.near].map(lambda name: abs(math.log(n_parameters(SIZES[name]) / size)))
        return table[off == off.min()]


TOPICS = (
    _Topic(
        "precision",
        "precision",
        Metric(
            "seconds",
            "precision",
            ("model", "batch", "context_length"),
            where={"part": "speed", "mode": "forward and backward"},
        ),
        "float32",
        "model",
    ),
    _Topic(
        "attention",
        "attention",
        Metric(
            "seconds",
            "implementation",
            ("sequence", "head_dim", "batch"),
            where={"phase": "forward and backward", "dtype": "float32"},
        ),
        "explicit",
        "sequence",
    ),
    _Topic(
        "compiled",
        "training_step",
        Metric(
            "seconds",
            "implementation",
            ("size", "batch", "context_length"),
            where={"sweep": "compile", "precision": "float32"},
        ),
        "eager",
        "size",
        lambda name: name == "compiled",
    ),
    _Topic(
        "wrapper",
        "data_parallel",
        Metric(
            "seconds",
            "implementation",
            ("workload", "batch", "context_length"),
            where={"sweep": "wrappers", "phase": "backward", "world_size": 2},
            without=("local",),
        ),
        "torch",
        "workload",
    ),
)


def recommend(model: str, context_length: int, runs: Mapping[str, Run]) -> list[Recommendation]:
    """One for each field of `Configuration`, in its order."""
    return [
        topic.recommend(runs[topic.lab].frame(), model, context_length)
        if topic.lab in runs
        else Recommendation(topic.field, topic.lab, getattr(DEFAULT, topic.field), f"{topic.lab} was not measured here")
        for topic in TOPICS
    ]


def join(recommendations: Sequence[Recommendation]) -> Configuration:
    """The configuration that follows all of them."""
    return Configuration(**{one.topic: one.value for one in recommendations})  # type: ignore[arg-type]


def newest_runs(machine: Machine | None = None, labs: Container[str] | None = None) -> dict[str, Run]:
    """By lab, of `labs` (None: those that decide a topic), the newest run of this machine that holds anything."""
    here = machine or describe_machine()
    wanted = {topic.lab for topic in TOPICS} if labs is None else labs
    runs: dict[str, Run] = {}
    folders = (runs_directory(), recorded_directory())
    files = [path for folder in folders for path in folder.glob("*/*.jsonl")]
    for path in sorted(files, key=lambda path: path.name, reverse=True):
        lab = path.parent.name
        if lab in runs or lab not in wanted:
            continue
        try:
            run = Run.load(path)
        except (RunFileError, OSError):
            continue
        if run.header.machine.identity == here.identity and not run.frame().empty:
            runs[lab] = run
    return runs
