"""The tuned step: all recommendations of the other labs combined in one configuration, compared
with the default."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Annotated, Any, Literal

import pandas as pd

from labkit.costs.transformer import SIZES
from labkit.lab.answers import Compare, Report
from labkit.lab.config import Count, DeviceConfig, Seconds, Some, one_of
from labkit.lab.declaration import Lab
from labkit.lab.metric import Metric, Results
from labkit.lab.recommended import DEFAULT, Configuration, recommend, runs_here
from labkit.lab.units import join_words
from labkit.machine.description import Machine
from labkit.nn.attention_implementations import IMPLEMENTATIONS as ATTENTION
from labkit.parallel.data_parallel import IMPLEMENTATIONS as WRAPPERS
from labkit.parallel.data_parallel import OVER_SHARED_MEMORY
from labkit.parallel.ranks.torchrun import ranks_here
from labkit.studies.shared.tables import WRAPPER_NAMES
from labkit.studies.tuned_step.worker import COMBINED, DEFAULT_NAME, TunedStepPoint, measure

FIELDS = tuple(Configuration.__dataclass_fields__)


class TunedStepConfig(DeviceConfig):
    """The parameters of this lab. None: as the newest runs of the other labs here recommend."""

    models: Some[Annotated[str, one_of(lambda: SIZES)]] = ["mini"]
    world_sizes: Some[Count] = [2]
    precision: Literal["float32", "bfloat16", "float16"] | None = None
    attention: Annotated[str, one_of(lambda: ATTENTION)] | None = None
    compiled: bool | None = None
    wrapper: Annotated[str, one_of(lambda: WRAPPERS)] | None = None
    batch: Count = 2
    context_length: Count = 64
    rounds_s: Seconds | None = 8.0


TIME = Metric("seconds", "implementation", ("model", "world_size", "batch", "context_length"))
NAMES = {DEFAULT_NAME: "the default", COMBINED: "the combined configuration"}


def points(config: TunedStepConfig, machine: Machine) -> Iterator[TunedStepPoint]:
    """Plan one point per model and number of ranks, with the recommendations of this moment."""
    device = machine.device(config.device)
    runs = runs_here(machine)
    gpus = len(machine.gpus)
    chosen = config.model_dump(include=set(FIELDS), exclude_none=True)
    recommended = {
        model: recommend(model, config.context_length, runs).configuration
        for model in config.models
    }
    ranks = set(config.world_sizes)
    if device == "cuda" and gpus > 0:
        # Each rank has a GPU to itself.
        ranks = {gpus if ranks_here(each) > gpus else each for each in ranks}
    for world_size, model in product(sorted(ranks), config.models):
        base = recommended[model]
        # Runs on the CPU recommend wrappers that a GPU's tensors cannot use.
        if device != "cpu" and base.wrapper in OVER_SHARED_MEMORY:
            base = replace(base, wrapper=DEFAULT.wrapper)
        about: dict[str, Any] = vars(base) | chosen
        if world_size == 1:
            about["backend"] = None  # one rank needs no process group
        yield TunedStepPoint.on(machine, config, world_size, model=model, **about)


def ingredients(results: Results) -> pd.DataFrame:
    """Return the combined configuration by model and ranks, and its changes in words."""
    # Each rank has a row, with the same configuration.
    rows = results.rows(["model", "world_size", *FIELDS], implementation=COMBINED)
    table = rows.drop_duplicates().reset_index(drop=True)
    return table.assign(changes=[_describe_changes(row) for row in table.to_dict("records")])


def _describe_changes(row: dict[str, Any]) -> str:
    words = {
        "precision": row["precision"],
        "attention": f"{row['attention']} attention",
        "compiled": "torch.compile",
        "wrapper": WRAPPER_NAMES.get(row["wrapper"], row["wrapper"]),
    }
    changed = [name for name in FIELDS if row[name] != getattr(DEFAULT, name)]
    if row["world_size"] == 1 and "wrapper" in changed:
        changed.remove("wrapper")  # one rank has none
    return join_words([words[name] for name in changed]) or "the defaults"


LAB = Lab(
    name="tuned_step",
    title="The tuned step",
    summary=(
        "All recommendations of the other labs combined in one configuration: what it gains over"
        " the default."
    ),
    config=TunedStepConfig,
    paper={
        "models": ["small", "medium", "large"],
        "world_sizes": [1, 2],
        "batch": 8,
        "context_length": 512,
    },
    on_gpu={"models": ["mini", "small"], "world_sizes": [1, 8], "batch": 8, "context_length": 512},
    preload=("torch._inductor.compile_fx",),
    worker=measure,
    points=points,
    model_parameters=("models",),
    alternatives=("implementation",),
    names=NAMES,
    questions=[
        Compare(
            id="gain",
            text="Does everything that the other labs recommend, together, beat the default?",
            metric=TIME,
            baseline=DEFAULT_NAME,
            advice="Train with the combined configuration{where}: `labkit advise --apply`.",
        ),
        Report(
            id="ingredients",
            text="What does the combined configuration use?",
            table=ingredients,
            configuration=("model", "world_size"),
            says="For `{model}` it uses {changes}.",
        ),
    ],
)
