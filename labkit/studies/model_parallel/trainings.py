"""One training step along each axis: a whole model, or split by tensor, pipeline, data, context."""

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from labkit.costs.communication import (
    ALL_REDUCE_COSTS,
    pipeline_idle_share,
    sent_bytes,
    tensor_parallel_calls,
)
from labkit.nn.training import Workload, random_tokens
from labkit.nn.transformer import Transformer, language_model_loss
from labkit.parallel.context import context_parallel, split_sequence
from labkit.parallel.pipeline import Pipeline
from labkit.parallel.pipeline_schedule import peak_activations
from labkit.parallel.sharding import whole_parameters
from labkit.parallel.tensor import tensor_parallel
from labkit.parallel.transport import AUTO, SHARED
from labkit.studies.model_parallel.point import (
    DATA,
    SEQUENCE,
    SETTINGS,
    TORCH,
    WHOLE,
    ModelParallelPoint,
)
from labkit.studies.shared.alternatives import ALL_CORES, cores_of_all_ranks, count_traffic
from labkit.studies.shared.checks import STEPS, Reference, train_in_one_process
from labkit.studies.shared.sharding_strategies import shard


@dataclass
class Trainer:
    """A training along one axis."""

    optimizer: Optimizer
    passes: Callable[[], Any]
    gather: Callable[[], Mapping[str, Tensor]]
    """Returns whole parameters by name."""
    pipeline: Any = None
    idle_s: list[float] = field(default_factory=list)
    """A pipeline's idle seconds in each step."""

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.passes()
        self.optimizer.step()


class Problem:
    """A model and the whole batch, tokens (B, S), the same on every rank."""

    def __init__(self, point: ModelParallelPoint, device: str) -> None:
        self.point = point
        self.device = device
        generator = torch.Generator().manual_seed(point.seed)
        tokens = random_tokens(point.shape, point.batch, point.context_length, generator)
        self.inputs, self.targets = (each.to(device) for each in tokens)
        self.reference: Reference = train_in_one_process(
            [Workload(self.build, self.loss)],
            lambda model: AdamW(model.parameters(), **SETTINGS),
        )

    def build(self) -> Transformer:
        torch.manual_seed(0)  # all trainings, on all ranks, begin with the same parameters
        with torch.device(self.device):
            return Transformer(self.point.shape, context_length=self.point.context_length)

    def loss(self, model: nn.Module) -> Tensor:
        return language_model_loss(model(self.inputs), self.targets)

    def check(
        self, make: Callable[..., Trainer], trainers: dict[str, Trainer], name: str
    ) -> dict[str, Any]:
        """Train some steps, compare with one process, and keep the trainer if it is right."""
        trainer = make(self)
        for _ in range(STEPS):
            trainer.step()
        columns = self.reference.check(
            {key: value.detach() for key, value in trainer.gather().items()}
        )
        if columns["status"] != "ok":
            return columns
        trainers[name] = trainer
        return columns | describe_traffic(self.point, name, trainer)


def gather_parts(model: nn.Module, parts: Iterable[tuple[nn.Module, int]]) -> dict[str, Tensor]:
    """Broadcast each part of a model from the rank that has it; return the parameters by name."""
    for part, owner in parts:
        for parameter in part.parameters():
            dist.broadcast(parameter.data, src=owner)
    return dict(model.named_parameters())


def train_whole(problem: Problem, *, has_all_cores: bool = False) -> Trainer:
    """Train the whole model on rank 0; the others do nothing."""
    model = problem.build()

    def passes() -> None:
        if dist.get_rank() == 0:
            with cores_of_all_ranks() if has_all_cores else nullcontext():
                problem.loss(model).backward()

    optimizer = AdamW(model.parameters(), **SETTINGS)
    return Trainer(optimizer, passes, partial(gather_parts, model, [(model, 0)]))


def train_cut(problem: Problem, transport: str = AUTO, *, is_sequence: bool = False) -> Trainer:
    """Train with tensor parallelism, with sequence parallelism or without."""
    model = tensor_parallel(problem.build(), sequence_parallel=is_sequence, transport=transport)
    optimizer = AdamW(model.parameters(), **SETTINGS)

    def passes() -> None:
        model(problem.inputs, problem.targets).backward()

    return Trainer(optimizer, passes, model.gather_state_dict)


def train_replicas(
    problem: Problem, implementation: str = "ddp", *, is_context: bool = False
) -> Trainer:
    """Train replicas ("ddp") or shards ("zero3") on a part of the batch.

    It is a rank's sequences; with `is_context`, its positions of all sequences.
    """
    bare = problem.build()
    if is_context:
        bare = context_parallel(bare)
        inputs = split_sequence(problem.inputs, dim=1)
        targets = split_sequence(problem.targets, dim=1)
    else:
        p = dist.get_world_size()
        inputs = problem.inputs.tensor_split(p)[dist.get_rank()]
        targets = problem.targets.tensor_split(p)[dist.get_rank()]
    model, optimizer = shard(implementation, bare, AdamW, **SETTINGS)

    def passes() -> None:
        language_model_loss(model(inputs), targets).backward()

    return Trainer(optimizer, passes, partial(whole_parameters, model))


def train_pipeline(problem: Problem, schedule: str, micro_batches: int) -> Trainer:
    """Train a pipeline, whose stages are balanced by their parameters."""
    model = problem.build()
    layers = [model.embedding, *model.layers, nn.Sequential(model.norm, model.output)]
    # FLOPs grow with the parameters, but for an embedding's, which are only looked up.
    costs = [sum(parameter.numel() for parameter in layer.parameters()) for layer in layers]
    costs[0] = 0
    pipeline = Pipeline(layers, schedule=schedule, micro_batches=micro_batches, costs=costs)
    idle_s: list[float] = []

    def passes() -> None:
        start = time.perf_counter()
        pipeline.step(problem.inputs, problem.targets, language_model_loss)
        # Reading the times waits for a GPU, so the clock is read after that.
        busy_s = sum(task.end_s - task.start_s for task in pipeline.times)
        idle_s.append(time.perf_counter() - start - busy_s)

    # Stages go around the ranks: rank r has the stages r, r + p, ...
    owners = [
        (layers[number], stage % pipeline.ranks)
        for stage, layer_numbers in enumerate(pipeline.stages)
        for number in layer_numbers
    ]
    optimizer = AdamW(pipeline.parameters(), **SETTINGS)
    return Trainer(optimizer, passes, partial(gather_parts, model, owners), pipeline, idle_s)


MAKERS: dict[str, Callable[[Problem], Trainer]] = {
    ALL_CORES: partial(train_whole, has_all_cores=True),
    WHOLE: train_whole,
    TORCH: partial(train_cut, transport=TORCH),
    SHARED: partial(train_cut, transport=SHARED),
    TORCH + SEQUENCE: partial(train_cut, transport=TORCH, is_sequence=True),
    SHARED + SEQUENCE: partial(train_cut, transport=SHARED, is_sequence=True),
}
AXES: dict[str, Callable[[Problem], Trainer]] = {
    DATA: train_replicas,
    "sharded": partial(train_replicas, implementation="zero3"),
    "tensor parallel": train_cut,
    "pipeline": lambda problem: train_pipeline(problem, "1f1b", problem.point.batch),
    "context parallel": partial(train_replicas, is_context=True),
}


def describe_traffic(point: ModelParallelPoint, name: str, trainer: Trainer) -> dict[str, Any]:
    """Return collectives, bytes and micro-batches of a step, with the formulas."""
    pipeline = trainer.pipeline
    # Of torch's collectives only the call is seen, not the messages.
    if SHARED not in name and pipeline is None:
        return {}
    row, calls = count_traffic(trainer.passes)
    p = dist.get_world_size()
    if pipeline is not None:
        idle_share = pipeline_idle_share(p, pipeline.micro_batches, chunks=pipeline.chunks)
        return row | {
            "held": pipeline.peak_held,
            "formula_held": peak_activations(pipeline.schedule[pipeline.rank]),
            "formula_busy": 1 - idle_share,
        }
    # It is chosen by size. Sequence parallelism may have no all-reduce: then any formula will do.
    algorithms = [call.algorithm for call in calls if call.collective == "all_reduce"]
    algorithm = algorithms[0] if algorithms else "butterfly"
    formula = tensor_parallel_calls(
        point.shape,
        point.batch,
        point.context_length,
        p,
        sequence_parallel=name.endswith(SEQUENCE),
    )
    sent = sent_bytes(formula, p, all_reduce=ALL_REDUCE_COSTS[algorithm])
    return row | {"formula_sent_bytes": sent}
