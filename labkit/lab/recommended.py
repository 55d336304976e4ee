"""The configuration of a training step that this machine's runs recommend, and its script.

A field gets an alternative that was significantly faster than the default in the newest run of a
lab here, on the requested model or the measured one nearest in size. It is the best alternative
over all configurations of the lab, unless the nearest one shows no gain for it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from labkit.costs.transformer import SIZES, n_parameters
from labkit.lab.answers import Compare
from labkit.lab.config import AUTO
from labkit.lab.declaration import find_lab
from labkit.lab.project import recorded_directory, runs_directory
from labkit.lab.runs.store import Run, newest_runs
from labkit.machine.description import Machine, describe_machine

# Attention of a length that differs by more is another question: the fastest changes with length.
MAX_LENGTH_RATIO = 2.0
STEP = "forward and backward"


@dataclass(frozen=True)
class Configuration:
    """Configuration of a training step. The defaults are those of a script that changes nothing."""

    precision: str = "float32"
    attention: str = "explicit"
    compiled: bool = False
    wrapper: str = "torch"


DEFAULT = Configuration()


@dataclass(frozen=True)
class Recommendation:
    """A configuration, and a reader's own alternatives that are faster still, by field."""

    configuration: Configuration
    user_alternatives: Mapping[str, str] = field(default_factory=dict)
    """Names only: labkit does not have their code."""


@dataclass(frozen=True)
class Choice:
    """A field of `Configuration`, and the question of a lab that decides it."""

    field: str
    lab: str
    question: str
    near: str
    """Column in which the nearest configuration is searched: a model, or "sequence"."""
    at: Mapping[str, Any]
    """Values of the rows that count, by column."""

    def choose(self, run: Run, model: str, context_length: int) -> tuple[Any, str | None]:
        """Choose the value of the field by a run; also a reader's alternative that is faster."""
        question = find_lab(self.lab).question(self.question)
        assert isinstance(question, Compare)
        table = question.metric.ratios_to(question.baseline, run.frame(), question.among)
        # A machine with GPUs trains on them, where the fastest for CPU tensors may not even run.
        device = run.header.machine.device(AUTO)
        for name, wanted in {**self.at, "device": device}.items():
            table = table[table[name] == wanted]
        column = question.metric.compare
        # The printed script can only name what labkit has.
        is_users = table[column].isin(run.header.user_alternatives)
        value = self._fastest(question, table[~is_users], model, context_length)
        best = self._fastest(question, table, model, context_length)
        # The only field that is a yes or no: its alternatives are "eager" and "compiled".
        if self.field == "compiled":
            value = value == "compiled"
        elif value is None:
            value = getattr(DEFAULT, self.field)
        if best not in run.header.user_alternatives:
            best = None
        return value, best

    def _fastest(
        self, question: Compare, table: pd.DataFrame, model: str, context_length: int
    ) -> Any:
        """Return the best of the alternatives that are faster in the nearest configuration."""
        distance = self._distances(table, model, context_length)
        name = question.metric.compare
        faster = table[(distance == distance.min()) & (table["verdict"] == "faster")]
        if faster.empty:
            return None
        # The subject is better over all configurations, of which the nearest is only a part.
        subject = faster[faster[name].isin(question.metric.select_subjects(table)[:1])]
        if len(subject):
            return subject[name].iloc[0]
        return faster.sort_values("ratio")[name].iloc[0]

    def _distances(self, table: pd.DataFrame, model: str, context_length: int) -> pd.Series:
        """Return |log(ratio)| of each row to the model or the length; NaN: too far."""
        if self.near == "sequence":
            distance = np.log(table["sequence"].astype(float) / context_length).abs()
            return distance.where(distance <= np.log(MAX_LENGTH_RATIO))
        # Models that are no Transformers, and have no size here, are too far (NaN).
        sizes = table[self.near].map(
            {name: float(n_parameters(shape)) for name, shape in SIZES.items()}
        )
        return np.log(sizes / n_parameters(SIZES[model])).abs()


CHOICES = (
    Choice("precision", "precision", "autocast_speed", "model", {"mode": STEP}),
    Choice("attention", "attention", "fastest", "sequence", {"dtype": "float32"}),
    Choice("compiled", "training_step", "compile", "size", {"precision": "float32"}),
    Choice("wrapper", "data_parallel", "fastest", "workload", {"world_size": 2}),
)


def recommend(model: str, context_length: int, runs: Mapping[str, Run]) -> Recommendation:
    """Join what these runs, by lab, recommend; fields of labs without a run keep their default."""
    chosen = {}
    user_alternatives = {}
    for choice in CHOICES:
        if choice.lab in runs:
            chosen[choice.field], name = choice.choose(runs[choice.lab], model, context_length)
            if name is not None:
                user_alternatives[choice.field] = name
    return Recommendation(Configuration(**chosen), user_alternatives)


def runs_here(machine: Machine) -> dict[str, Run]:
    """Return the newest runs of this machine that may recommend something, by lab."""
    runs: dict[str, Run] = {}
    for lab in {choice.lab for choice in CHOICES}:
        # Recorded runs, too: the machine that recorded them may be this one.
        newest = newest_runs(runs_directory() / lab, recorded_directory() / lab)
        usable = next((run for run in newest if _may_recommend(run, machine)), None)
        if usable is not None:
            runs[lab] = usable
    return runs


def _may_recommend(run: Run, machine: Machine) -> bool:
    """Return whether a run is of this machine, whole and quiet."""
    # A run of which this is not true does not replace the one before it.
    header = run.header
    if header.machine.identity != machine.identity or header.profile == "smoke":
        return False
    if header.is_partial or run.pending or run.is_busy:
        return False
    return not run.frame().empty


def recommended_code(model: str | None, context_length: int | None) -> str:
    """Return a script as this machine's newest runs recommend. ValueError for an unknown model."""
    if model is not None and model not in SIZES:
        raise ValueError(
            f"expected --model among {', '.join(SIZES)} with --apply, got {model[:40]!r}"
        )
    size = model or "small"
    length = context_length or 128
    recommended = recommend(size, length, runs_here(describe_machine()))
    code = write_code(recommended.configuration, size, length)
    notes = [
        f"# Your {field} {name!r} was faster here than the one below: put it in its place."
        for field, name in recommended.user_alternatives.items()
    ]
    return "\n".join([*notes, code])


def write_code(chosen: Configuration, model: str, context_length: int) -> str:
    """Return a script that builds the model under this configuration and makes a step."""
    # As the lab compiles what it times: a training's shapes are the same in every step.
    compiling = ["model.compile(dynamic=False)"] if chosen.compiled else []
    forward = ["    loss = language_model_loss(wrapped(inputs), targets)"]
    if chosen.precision != DEFAULT.precision:
        autocast = f"with torch.autocast(inputs.device.type, dtype=torch.{chosen.precision}):"
        forward = [f"    {autocast}", f"    {forward[0]}"]
    lines = [
        "import torch",
        "import torch.distributed as dist",
        "",
        "from labkit.costs.transformer import SIZES",
        "from labkit.nn.attention_implementations import IMPLEMENTATIONS",
        "from labkit.nn.transformer import Transformer, language_model_loss",
        "from labkit.parallel.data_parallel import wrap",
        "",
        f'attend = IMPLEMENTATIONS["{chosen.attention}"]',
        f'model = Transformer(SIZES["{model}"], context_length={context_length}, attention=attend)',
        *compiling,
        f'wrapped = wrap("{chosen.wrapper}", model) if dist.is_initialized() else model',
        "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)",
        "",
        "",
        "def train_step(inputs, targets):",
        *forward,
        "    loss.backward()",
        "    optimizer.step()",
        "    optimizer.zero_grad(set_to_none=True)",
        "    return loss.detach()",
    ]
    return "\n".join(lines)
