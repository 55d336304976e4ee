"""Recommendations from this machine's runs, by topic, joined into one configuration of a training step.

A recommendation is an alternative that was significantly faster than the default in the newest run of a lab here, on
the requested model or the measured one nearest in size. It is the best alternative over all configurations of the lab,
unless the nearest one shows no gain for it.
"""

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from labkit.costs.transformer import SIZES, n_parameters
from labkit.lab.metric import Metric
from labkit.lab.project import recorded_directory, runs_directory
from labkit.lab.runs.store import Run, RunFileError
from labkit.lab.units import label
from labkit.machine import Machine, describe_machine

MAX_LENGTH_RATIO = 2.0  # factor by which a measured sequence may differ in length for its result to apply


@dataclass(frozen=True)
class Configuration:
    """Configuration of a training step. The defaults are those of a script that changes nothing."""

    precision: str = "float32"
    attention: str = "explicit"
    compiled: bool = False
    wrapper: str = "torch"


DEFAULT = Configuration()
RANK_FIELDS = ("wrapper",)
"""Fields that mean nothing on one rank."""


@dataclass(frozen=True)
class Recommendation:
    """A field of `Configuration`, the value to use, and the comparison behind it: its time over the default's."""

    topic: str
    lab: str
    value: object
    reason: str
    ratio: float = 1.0
    """1 if the default stays; `low` and `high` are its interval."""
    low: float = 1.0
    high: float = 1.0


@dataclass(frozen=True)
class Topic:
    """A field of `Configuration`, and the lab's comparison that decides it."""

    field: str
    lab: str
    baseline: str
    metric: Metric
    near: str
    """Column in which the nearest configuration is found: a model, or "sequence"."""

    def recommend(self, frame: pd.DataFrame, model: str, context_length: int) -> Recommendation:
        """Recommend an alternative from the frame of a run."""
        table = self.metric.ratios_to(self.baseline, frame)
        distance = self._distances(table, model, context_length)
        faster = table[(distance == distance.min()) & (table["verdict"] == "faster")]
        if faster.empty:
            return Recommendation(self.field, self.lab, self.default, "nothing was measured to be faster")
        best = faster[faster[self.metric.compare] == self.metric.best(table)]
        row = (best if len(best) else faster).sort_values("ratio").iloc[0]
        name = row[self.metric.compare]
        where = label(self.near, row[self.near])
        reason = f"{name} takes {row['ratio']:.2f} times as long as {self.baseline} with {where}"
        value = name == "compiled" if isinstance(self.default, bool) else name
        bounds = (float(row[bound]) for bound in ("ratio", "low", "high"))
        return Recommendation(self.field, self.lab, value, reason, *bounds)

    @property
    def default(self) -> object:
        return getattr(DEFAULT, self.field)

    def _distances(self, table: pd.DataFrame, model: str, context_length: int) -> pd.Series:
        """Distance of each row from the model or the length of a sequence, as |log(ratio)|; NaN: too far."""
        if self.near == "sequence":
            distance = np.log(table["sequence"].astype(float) / context_length).abs()
            return distance.where(distance <= math.log(MAX_LENGTH_RATIO))
        sizes = table[self.near].map({name: float(n_parameters(shape)) for name, shape in SIZES.items()})
        return np.log(sizes / n_parameters(SIZES[model])).abs()


def _topic(field: str, lab: str, baseline: str, compare: str, near: str, **where: Any) -> Topic:
    columns = (near, "batch", "head_dim" if near == "sequence" else "context_length")
    return Topic(field, lab, baseline, Metric("seconds", compare, columns, where, without=("local",)), near)


STEP = "forward and backward"
TOPICS = (
    _topic("precision", "precision", "float32", "precision", "model", part="speed", mode=STEP),
    _topic("attention", "attention", "explicit", "implementation", "sequence", phase=STEP, dtype="float32"),
    _topic("compiled", "training_step", "eager", "implementation", "size", sweep="compile", precision="float32"),
    _topic(
        "wrapper",
        "data_parallel",
        "torch",
        "implementation",
        "workload",
        sweep="wrappers",
        phase="backward",
        world_size=2,
    ),
)


def recommend(model: str, context_length: int, runs: Mapping[str, Run]) -> list[Recommendation]:
    """Recommend a value for each field of `Configuration`, in its order."""
    return [
        topic.recommend(runs[topic.lab].frame(), model, context_length)
        if topic.lab in runs
        else Recommendation(topic.field, topic.lab, topic.default, f"{topic.lab} was not measured here")
        for topic in TOPICS
    ]


def join(recommendations: Sequence[Recommendation]) -> Configuration:
    """Join recommendations into one configuration."""
    return Configuration(**{one.topic: one.value for one in recommendations})  # type: ignore[arg-type]


def newest_runs(machine: Machine | None = None, labs: Container[str] | None = None) -> dict[str, Run]:
    """Newest run of this machine with rows, by lab; of `labs`, or of those that decide a topic."""
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


def recommended_code(model: str | None, context_length: int | None) -> str:
    """Lines of a script that trains as this machine's newest runs recommend: attention, compile, wrapper, autocast.

    ValueError for a model that no lab trains here.
    """
    if model is not None and model not in SIZES:
        raise ValueError(f"expected --model among {', '.join(SIZES)} with --apply, got {model[:40]!r}")
    size, length = model or "small", context_length or 128
    return write_code(join(recommend(size, length, newest_runs())), size, length)


def write_code(chosen: Configuration, model: str, context_length: int) -> str:
    """Lines that build the model under this configuration and make one step; on one rank without the wrapper's."""
    lines = [
        "import torch",
        "import torch.distributed as dist",
        "",
        "from labkit.nn.attention_implementations import attention_named",
        "from labkit.nn.transformer import Transformer, language_model_loss, shape_named",
        "from labkit.parallel.data_parallel import wrap",
        "",
        f'attend = attention_named("{chosen.attention}").attend',
        f'model = Transformer(shape_named("{model}"), context_length={context_length}, attention=attend)',
        *(["model.compile(dynamic=False)"] if chosen.compiled else []),
        f'wrapped = wrap("{chosen.wrapper}", model) if dist.is_initialized() else model',
        "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)",
        "",
        "",
        "def train_step(inputs, targets):",
        *_loss_lines(chosen.precision),
        "    loss.backward()",
        "    optimizer.step()",
        "    optimizer.zero_grad(set_to_none=True)",
        "    return loss.detach()",
    ]
    return "\n".join(lines)


def _loss_lines(precision: str) -> list[str]:
    if precision == "float32":
        return ["    loss = language_model_loss(wrapped(inputs), targets)"]
    return [
        f"    with torch.autocast(inputs.device.type, dtype=torch.{precision}):",
        "        loss = language_model_loss(wrapped(inputs), targets)",
    ]
