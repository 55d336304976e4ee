"""What every rank runs for a point of the lab on model parallelism: check each training, then time it.

``tensor``    a model on one rank, and cut over the ranks by each way to send: forward and backward in turns
``pipeline``  schedules and numbers of micro-batches in turns: seconds of a step, and what of it a rank idles
``axes``      a model and batch trained along each axis in turns: seconds and peak memory of a step

Every training is compared with one process on the whole batch first, by its parameters after two steps.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from labkit.bench.memory import peak_of_second
from labkit.costs.communication import (
    ALL_REDUCE_COSTS,
    butterfly,
    pipeline_idle_share,
    sent_bytes,
    tensor_parallel_calls,
)
from labkit.costs.transformer import SIZES, TransformerShape, n_parameters
from labkit.lab.point import TimedPoint, skip_reason
from labkit.nn.training import Workload, random_tokens
from labkit.nn.transformer import Transformer, language_model_loss
from labkit.parallel.context import context_parallel, split_sequence
from labkit.parallel.pipeline import Pipeline, measure_layers
from labkit.parallel.pipeline_schedule import peak_activations
from labkit.parallel.ranks.torchrun import ranks_here
from labkit.parallel.ranks.worker import use_device
from labkit.parallel.sharding import shard, whole_parameters
from labkit.parallel.tensor import tensor_parallel
from labkit.parallel.traffic import recorded_traffic
from labkit.parallel.transport import AUTO, SHARED, transport_in_use
from labkit.studies.shared.alternatives import row_of, timed_rows
from labkit.studies.shared.training_check import STEPS, Reference, train_in_one_process

if TYPE_CHECKING:
    from labkit.machine import Machine

TENSOR, PIPELINE, AXIS, DATA = "tensor", "pipeline", "axes", "data parallel"
WHOLE, TORCH, SEQUENCE = "one rank", "torch", ", sequence parallel"
WAYS = (WHOLE, TORCH, SHARED, TORCH + SEQUENCE, SHARED + SEQUENCE)
"""The whole model on one rank, and tensor parallelism by what sends; with sequence parallelism, too."""
HEADS, VOCABULARY = 8, 128
SETTINGS: Mapping[str, Any] = {"lr": 1e-3, "eps": 1e-5}  # of AdamW; `eps` is above the rounding of a gradient
LEAST_TASK_S = 0.005  # of a forward pass through a stage, so that messages hide no bubble
RANK_BYTES = 300 * 2**20  # resident memory of a rank, torch included
COPIES = 5  # of the parameters per alternative: parameters, gradients, two states, messages


@dataclass(frozen=True, kw_only=True)
class ModelParallelPoint(TimedPoint):
    """A model, a batch, and what is compared on them."""

    sweep: str
    alternatives: tuple[str, ...]
    """Ways to send, schedules, or axes."""
    widths: tuple[int, ...] = ()
    """Width of the model; of a pipeline the first is taken whose stages take long enough."""
    layers: int = 2
    model: str = ""
    """A named size, instead of widths and layers."""
    batch: int = 2
    context_length: int = 64
    micro_batches: tuple[int, ...] = ()
    device: str = "cpu"

    @property
    def shape(self) -> TransformerShape:
        """The widest; without a name, a Transformer of few tokens, in which layers cost most."""
        d = max(self.widths, default=2 * HEADS)
        wide = TransformerShape(d_model=d, d_ff=4 * d, n_layers=self.layers, n_heads=HEADS, vocabulary=VOCABULARY)
        return SIZES.get(self.model, wide)

    def skip_reason(self, machine: "Machine") -> str | None:
        ranks = ranks_here(self.world_size)
        if self.sweep == PIPELINE and self.device == "cpu" and ranks > machine.cores:
            return "more ranks than cores: their time slices would be measured"
        models = len(self.alternatives) * max(1, len(self.micro_batches)) + 1
        needed = ranks * (RANK_BYTES + models * COPIES * 4 * n_parameters(self.shape))
        return skip_reason(machine, self.device, needed, ranks=ranks)

    def title(self) -> str:
        return f"{super().title()}, {self.sweep}, {self.model or f'width {self.widths[-1]}'}"


@dataclass
class Trainer:
    """A training along one axis. `passes` are forward and backward; `gather` returns whole parameters by name."""

    optimizer: Optimizer
    passes: Callable[[], Any]
    gather: Callable[[], Mapping[str, Tensor]]
    pipeline: Any = None
    idle_s: list[float] = field(default_factory=list)
    """What a pipeline idles in each step: all but its tasks."""

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.passes()
        self.optimizer.step()


class Problem:
    """A model and the whole batch, tokens (B, S), the same on every rank."""

    def __init__(self, point: ModelParallelPoint, device: str) -> None:
        self.point, self.device = point, device
        generator = torch.Generator().manual_seed(point.seed)
        tokens = random_tokens(point.shape, point.batch, point.context_length, generator)
        self.inputs, self.targets = (each.to(device) for each in tokens)
        self.reference: Reference = train_in_one_process([Workload(self.build, self.loss)], AdamW, SETTINGS)

    def build(self) -> Transformer:
        torch.manual_seed(0)
        with torch.device(self.device):
            return Transformer(self.point.shape, context_length=self.point.context_length)

    def loss(self, model: nn.Module) -> Tensor:
        return language_model_loss(model(self.inputs), self.targets)

    def check(self, make: "Make", trainers: dict[str, Trainer], name: str) -> dict[str, Any]:
        """Train for some steps, compare with one process, and add the trainer to the others if it is right."""
        trainer = make(self)
        for _ in range(STEPS):
            trainer.step()
        error, verdict = self.reference.check({name: value.detach() for name, value in trainer.gather().items()})
        trainers |= {name: trainer} if verdict == "ok" else {}
        return {"error": error, "check": verdict}


Make = Callable[[Problem], Trainer]


def gather_parts(model: nn.Module, parts: Iterable[tuple[nn.Module, int]]) -> dict[str, Tensor]:
    """Parameters of a model with each part taken from the rank that has it, on every rank."""
    for part, owner in parts:
        for parameter in part.parameters():
            dist.broadcast(parameter.data, src=owner)
    return dict(model.named_parameters())


def train_whole(problem: Problem) -> Trainer:
    """The model on the first rank; the others do nothing."""
    model = problem.build()
    passes = (lambda: problem.loss(model).backward()) if dist.get_rank() == 0 else int
    return Trainer(AdamW(model.parameters(), **SETTINGS), passes, partial(gather_parts, model, [(model, 0)]))


def train_cut(problem: Problem, transport: str = AUTO, *, is_sequence: bool = False) -> Trainer:
    """Tensor parallelism, with sequence parallelism or without."""
    model = tensor_parallel(problem.build(), sequence_parallel=is_sequence, transport=transport)
    optimizer = AdamW(model.parameters(), **SETTINGS)
    return Trainer(optimizer, lambda: model(problem.inputs, problem.targets).backward(), model.gather_state_dict)


def train_replicas(problem: Problem, implementation: str = "ddp", *, is_context: bool = False) -> Trainer:
    """Data parallelism in whole copies ("ddp") or in shards ("zero3"): each rank on its rows, or on its positions."""
    bare, p = problem.build(), dist.get_world_size()
    model, optimizer = shard(implementation, context_parallel(bare) if is_context else bare, AdamW, **SETTINGS)
    split = partial(split_sequence, dim=1) if is_context else lambda tokens: tokens.tensor_split(p)[dist.get_rank()]
    inputs, targets = split(problem.inputs), split(problem.targets)
    finish = getattr(model, "finish_gradient_synchronization", lambda: None)

    def passes() -> None:
        language_model_loss(model(inputs), targets).backward()
        finish()

    return Trainer(optimizer, passes, lambda: whole_parameters(model))


def train_pipeline(problem: Problem, schedule: str, micro_batches: int) -> Trainer:
    """Stages are balanced by parameters, but for the embedding's, which are looked up."""
    model = problem.build()
    layers = [model.embedding, *model.layers, nn.Sequential(model.norm, model.output)]
    costs = [0, *(sum(parameter.numel() for parameter in layer.parameters()) for layer in layers[1:])]
    pipeline = Pipeline(layers, schedule=schedule, micro_batches=micro_batches, costs=costs)
    idle_s: list[float] = []

    def passes() -> None:
        start = time.perf_counter()
        pipeline.step(problem.inputs, problem.targets, language_model_loss)
        idle_s.append(time.perf_counter() - start - sum(task.end_s - task.start_s for task in pipeline.times))

    owners = [(layers[number], stage % pipeline.ranks) for stage, own in enumerate(pipeline.stages) for number in own]
    optimizer = AdamW(pipeline.parameters(), **SETTINGS)
    return Trainer(optimizer, passes, partial(gather_parts, model, owners), pipeline, idle_s)


AXES: dict[str, Make] = {
    DATA: train_replicas,
    "sharded": partial(train_replicas, implementation="zero3"),
    "tensor parallel": train_cut,
    "pipeline": lambda problem: train_pipeline(problem, "1f1b", problem.point.batch),
    "context parallel": partial(train_replicas, is_context=True),
}


def measure(point: ModelParallelPoint) -> Iterator[dict[str, Any]]:
    """Rows of one point: seconds by alternative in turns; then, of axes, the allocator's peak, one after the other."""
    device = use_device(point.device)
    rows, trainers = dict[str, dict[str, Any]](), dict[str, Trainer]()
    for name, about, problem, make in _alternatives(point, device):
        if SHARED in name and (transport := transport_in_use(device=torch.device(device)))[0] != SHARED:
            yield about | {"not_measured": transport[1]}
            continue
        rows[name] = about | row_of(name, partial(problem.check, make, trainers, name), device=device)
        if name in trainers:
            rows[name] |= _describe(point, name, trainers[name])
    is_axis = point.sweep == AXIS  # whose steps are whole ones
    turns = {name: trainer.step if is_axis else trainer.passes for name, trainer in trainers.items()}
    clock = point.rounds | {"prepare": lambda name: trainers[name].optimizer.zero_grad()}
    for name, row in zip(rows, timed_rows(rows, turns, device=device, before=dist.barrier, **clock), strict=True):
        has_idle = point.sweep == PIPELINE and "seconds" in row
        yield row | ({"idle_s": trainers[name].idle_s[-len(row["seconds"]) :]} if has_idle else {})
    for axis in trainers if is_axis else ():
        dist.barrier()
        yield {"axis": axis} | row_of(axis, partial(_measure_peak, AXES[axis], problem), device=device)


def _alternatives(point: ModelParallelPoint, device: str) -> Iterator[tuple[str, dict[str, Any], Problem, Make]]:
    """Name, columns, problem and maker of each. A pipeline's micro-batches are of one sequence each."""
    if point.sweep == PIPELINE:
        width = _choose_width(point, device)
        for micro_batches in point.micro_batches:
            problem = Problem(replace(point, widths=(width,), batch=micro_batches), device)
            for schedule in point.alternatives:
                about = {"schedule": schedule, "micro_batches": micro_batches, "width": width}
                make = partial(train_pipeline, schedule=schedule, micro_batches=micro_batches)
                yield f"{schedule}, {micro_batches}", about, problem, make
        return
    problem = Problem(point, device)
    for name in point.alternatives:
        if point.sweep == AXIS:
            yield name, {"axis": name}, problem, AXES[name]
            continue
        cut = partial(train_cut, transport=name.removesuffix(SEQUENCE), is_sequence=name.endswith(SEQUENCE))
        yield name, {"way": name, "width": point.widths[0]}, problem, train_whole if name == WHOLE else cut


def _describe(point: ModelParallelPoint, name: str, trainer: Trainer) -> dict[str, Any]:
    """What a step sends or holds on this rank, beside the formulas. Notes by which ranks agree are left out."""
    p = dist.get_world_size()
    if (pipeline := trainer.pipeline) is not None:
        share = pipeline_idle_share(p, pipeline.micro_batches, chunks=pipeline.chunks)
        held = {"held": pipeline.peak_held, "formula_held": peak_activations(pipeline.schedule[pipeline.rank])}
        return held | {"formula_busy": 1 - share}
    if SHARED not in name:
        return {}
    with recorded_traffic() as traffic:
        trainer.passes()
    calls = [call for call in traffic if call.dtype == "float32"]
    cost = next((ALL_REDUCE_COSTS[call.algorithm] for call in calls if call.collective == "all_reduce"), None)
    size, is_sequence = (point.shape, point.batch, point.context_length), name.endswith(SEQUENCE)
    formula = sent_bytes(
        tensor_parallel_calls(*size, p, sequence_parallel=is_sequence), p, all_reduce=cost or butterfly
    )
    return {"sent_bytes": sum(call.sent_bytes for call in calls), "formula_sent_bytes": formula}


def _choose_width(point: ModelParallelPoint, device: str) -> int:
    """The first width at which a forward pass through a rank's layers takes long enough, or the last."""
    for width in point.widths:
        with torch.device(device):
            model = Transformer(replace(point, widths=(width,), layers=1).shape, context_length=point.context_length)
            (layer_s,) = measure_layers(list(model.layers), torch.zeros(1, point.context_length, width))
        if layer_s * point.layers / point.world_size >= LEAST_TASK_S:
            break
    return width


def _measure_peak(make: Make, problem: Problem) -> dict[str, Any]:
    """The peak of a trainer that can gather nothing: a pipeline then has only this rank's layers."""
    peak = peak_of_second(lambda: replace(make(problem), gather=dict), Trainer.step, device=problem.device)
    return {"check": "ok", "peak_bytes": peak}
