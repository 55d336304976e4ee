"""Pipelines compute what one process does, in every schedule; schedules end, and hold and idle what they say."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy

from labkit.costs import communication
from labkit.parallel import pipeline
from labkit.parallel.collectives import all_reduce
from labkit.parallel.data_parallel import BucketedDDP
from labkit.parallel.launch import run_ranks
from labkit.parallel.pipeline import Pipeline, measure_layers
from labkit.parallel.pipeline_schedule import Task, balance, make_schedule, peak_activations, plan_rank, simulate
from labkit.parallel.traffic import recorded_traffic

pytestmark = pytest.mark.usefixtures("workers_travel_by_value")

TOKENS = (torch.arange(24) * 5 % 7).view(8, 3)
TARGETS = TOKENS.roll(2)
FLOAT32 = 128 * torch.finfo(torch.float32).eps
SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2}


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, hidden), nn.Linear(hidden, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class TiedHead(nn.Module):
    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.weight = embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t()


def build(dtype: torch.dtype = torch.float64, seed: int = 0) -> list[nn.Module]:
    """Nine layers of unlike size, the last tied to the first."""
    torch.manual_seed(seed)
    embedding = nn.Embedding(7, 6)
    layers = [embedding, *(Block(hidden) for hidden in (5, 9, 2, 30, 3, 4, 8)), TiedHead(embedding)]
    return [layer.to(dtype) for layer in layers]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, -2), targets.flatten())


def reference(dtype: torch.dtype, start: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients, and that of the activations if they are the inputs."""
    model = nn.Sequential(*build(dtype)[start:])
    inputs = inputs_from(start, dtype)
    loss = loss_of(model(inputs), TARGETS)
    loss.backward()
    result = {name: p.grad for name, p in model.named_parameters(remove_duplicate=False)}
    return loss.detach(), result | ({"inputs": inputs.grad} if start else {})


def inputs_from(start: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    activations = torch.randn(8, 3, 6, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()
    return activations if start else TOKENS


def run_step(
    start: int = 0, dtype: torch.dtype = torch.float64, **options: Any
) -> tuple[Tensor, dict[str, Tensor], Any]:
    """Loss, gradients by the names of the whole list, and the pipeline, which did two steps."""
    stages = Pipeline(build(dtype, dist.get_rank())[start:], **options)
    inputs = inputs_from(start, dtype)
    for _ in range(2):
        loss = stages.step(inputs, TARGETS, loss_of)
    result = {name.removeprefix("layers."): p.grad / 2 for name, p in stages.named_parameters()}
    if start and stages.rank == 0:
        result["inputs"] = inputs.grad / 2
    return loss, result, stages


def furthest(loss: Tensor, result: dict[str, Tensor], expected: tuple[Tensor, dict[str, Tensor]]) -> float:
    pairs = [(loss, expected[0]), *((value, expected[1][name]) for name, value in result.items())]
    return float(max((a - b).abs().max() / (1 + b.abs().max()) for a, b in pairs))


def check_parity() -> list[str]:
    """Every schedule and number of micro-batches; also in float32, with recomputation, with inputs' gradients."""
    wrong = []
    for schedule in SCHEDULES:
        for number in (1, 2, 4, 8):
            options: dict[str, Any] = {"schedule": schedule, "micro_batches": number, "transport": "auto"}
            for dtype, start, more in (
                (torch.float64, 0, {}),
                (torch.float32, 0, {"recompute": True, "transport": "point_to_point"}),
                (torch.float64, 1, {"costs": [1, 5, 1, 1, 2, 1, 1, 1]}),
            ):
                loss, result, stages = run_step(start, dtype, **options | more)
                error = furthest(loss, result, reference(dtype, start))
                if not error <= (1e-10 if dtype == torch.float64 else FLOAT32):
                    wrong.append(f"{options | more}: {error}")
                order = stages.schedule[stages.rank]
                if [each.task for each in stages.times] != order or stages.peak_held != peak_activations(order):
                    wrong.append(f"{options | more}: ran {stages.times}, held {stages.peak_held}")
    return wrong


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_it_computes_what_one_process_does(world_size: int) -> None:
    assert run_ranks(check_parity, world_size=world_size, timeout_s=300) == [[]] * world_size


@contextmanager
def without_message(left_out: Task | str) -> Iterator[None]:
    """Leave one message of a step out, on both sides: its receiver gets zeros."""
    originals = pipeline._Run.pass_on, Pipeline._sum_tied, pipeline.all_reduce

    def pass_on(run: Any, task: Task) -> None:
        if task != left_out:
            originals[0](run, task)
        elif task in run._outgoing:
            run._outgoing.pop(task)
        else:
            shape, dtype = run._pipeline._shapes[run._batches, min(task.stage, task.destination.stage)]
            run._arrived[task.destination] = torch.zeros(shape, dtype=dtype)

    pipeline._Run.pass_on = pass_on
    if left_out == "tied":
        Pipeline._sum_tied = lambda *arguments: None
    if left_out == "loss":
        pipeline.all_reduce = lambda *arguments, **options: None
    try:
        yield
    finally:
        pipeline._Run.pass_on, Pipeline._sum_tied, pipeline.all_reduce = originals


def find_needless_messages(schedule: str) -> list[str]:
    """Name the messages without which no rank gets a wrong result."""
    needless, expected = [], reference(torch.float64)
    stages = Pipeline(build(), schedule=schedule, micro_batches=2)
    stages.step(TOKENS, TARGETS, loss_of)  # announces shapes
    messages = {task for rank in range(3) for is_message, task in plan_rank(stages.schedule, rank) if is_message}
    for left_out in (*sorted(messages), "tied", "loss"):
        stages.zero_grad()
        with without_message(left_out):
            loss = stages.step(TOKENS, TARGETS, loss_of)
        result = {name.removeprefix("layers."): p.grad for name, p in stages.named_parameters()}
        error = torch.tensor([furthest(loss, result, expected)])
        dist.all_reduce(error, op=dist.ReduceOp.MAX)
        if error <= 1e-10:
            needless.append(str(left_out))
    return [*needless, f"{len(messages)} messages"]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_message_is_needed(schedule: str) -> None:
    total = 2 * 2 * (3 * SCHEDULES[schedule] - 1)
    assert run_ranks(find_needless_messages, schedule, world_size=3) == [[f"{total} messages"]] * 3


def count_bytes(schedule: str) -> float:
    """Bytes that this rank sends in a step, but for the notes it agrees by, and those of the formula."""
    p, rank, chunks = dist.get_world_size(), dist.get_rank(), SCHEDULES[schedule]
    stages = Pipeline(build(), schedule=schedule, micro_batches=4)
    with recorded_traffic() as traffic:
        stages.step(TOKENS, TARGETS, loss_of)
    sent = sum(call.sent_bytes for call in traffic if call.dtype != "int64")
    tied = 7 * 6 * 8 if rank in (0, p - 1) else 0
    calls = communication.pipeline_calls(2 * 3 * 6 * 8, p, rank, 4, chunks=chunks, tied_bytes=tied)
    return sent - communication.sent_bytes(calls, p, all_reduce=communication.recursive_doubling)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_step_sends_what_the_formula_says(schedule: str) -> None:
    assert run_ranks(count_bytes, schedule, world_size=4) == [0] * 4


@given(st.sampled_from(list(SCHEDULES)), st.integers(1, 9), st.integers(1, 24), st.integers(2, 5))
def test_schedules_end_and_neighbors_agree(schedule: str, ranks: int, micro_batches: int, chunks: int) -> None:
    """Rendezvous messages, as large ones are, end in the order of every rank's plan; peaks and idle shares hold."""
    chunks = chunks if schedule == "interleaved" else 1
    orders = make_schedule(schedule, ranks, micro_batches, chunks=chunks)
    tasks = [Task(s, kind, k) for s in range(ranks * chunks) for kind in "FB" for k in range(micro_batches)]
    assert sorted(chain(*orders)) == sorted(tasks)
    pass_rendezvous([plan_rank(orders, rank) for rank in range(ranks)])
    for rank, order in enumerate(orders):
        peak = peak_activations(order)
        assert peak == {"gpipe": micro_batches, "1f1b": min(micro_batches, ranks - rank)}.get(schedule, peak)
        assert peak <= max(micro_batches, min(chunks * micro_batches, (chunks + 1) * (2 * ranks)))
    if micro_batches >= ranks:
        end = max(times[-1].end_s for times in simulate(orders))
        idle = 1 - 3 * micro_batches * chunks / end
        assert idle == pytest.approx(communication.pipeline_idle_share(ranks, micro_batches, chunks=chunks))


def pass_rendezvous(plans: list[list[tuple[bool, Task]]]) -> None:
    """Carry the plans out with messages for which both sides wait; no task comes before its input."""
    positions, done = [0] * len(plans), set()
    while any(position < len(plan) for position, plan in zip(positions, plans, strict=True)):
        now = [
            plan[position] if position < len(plan) else None for position, plan in zip(positions, plans, strict=True)
        ]
        ready = [r for r, event in enumerate(now) if event is not None and (not event[0] or now.count(event) == 2)]
        if len(plans) == 1:
            ready = [0]
        assert ready, f"all wait: {now}"
        for rank in ready:
            is_message, task = now[rank]
            if not is_message and task.kind == "F" and task.stage:
                assert (True, task._replace(stage=task.stage - 1)) in done
            positions[rank] += 1
        done.update(now[rank] for rank in ready)


def test_a_task_that_would_wait_forever_is_named() -> None:
    with pytest.raises(ValueError, match=r"Task.*'B'"):
        simulate([[Task(0, "B", 0), Task(0, "F", 0)]])


def test_stages_are_balanced() -> None:
    assert balance([1, 1, 1, 3], 2) == [range(3), range(3, 4)]
    assert balance([5, 1, 1, 1, 1, 1], 3) == [range(1), range(1, 3), range(3, 6)]
    assert balance([0, 0, 0], 3) == [range(1), range(1, 2), range(2, 3)]


def refuse() -> list[str]:
    """Return this rank's errors; a collective after each shows that no message was left behind."""
    rank, good = dist.get_rank(), Pipeline(build(), micro_batches=4)
    attempts: list[Callable[[], object]] = [
        lambda: Pipeline(build(), micro_batches=0),
        lambda: Pipeline(build(), micro_batches=1 + rank),
        lambda: Pipeline(build(), micro_batches=1, schedule="best"),
        lambda: Pipeline(build()[:2], micro_batches=1),
        lambda: Pipeline(build()[: 9 - rank], micro_batches=1),
        lambda: Pipeline(build(), micro_batches=1, costs=[1.0]),
        lambda: good.step(TOKENS[:7], TARGETS[:7], loss_of),
        lambda: good.step(TOKENS[: 8 - 4 * (rank == 1)], TARGETS, loss_of),
        lambda: good.step(TOKENS, TARGETS[:4], loss_of),
    ]
    return [refusal_text(attempt) for attempt in attempts]


def refusal_text(attempt: Callable[[], object]) -> str:
    try:
        attempt()
    except ValueError as error:
        total = torch.ones(3)
        all_reduce(total, op="sum")
        assert total.tolist() == [dist.get_world_size()] * 3
        return str(error)
    return "accepted"


def test_what_cannot_run_is_refused_in_one_line_on_all_ranks() -> None:
    same, batch = "expected the same", "a batch that 4 micro-batches divide"
    expected = [
        "0 micro-batches",
        same,
        "among gpipe",
        "3 layers or more",
        same,
        "with a cost each",
        batch,
        same,
        batch,
    ]
    for texts in run_ranks(refuse, world_size=3):
        for text, part in zip(texts, expected, strict=True):
            assert part in text
            assert "\n" not in text


def combine_axes() -> float:
    """Two pipelines of two ranks, each with half of the batch; a wrapper averages their gradients."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipeline"))
    part = mesh.get_local_rank("data")
    stages = Pipeline(build(seed=dist.get_rank()), micro_batches=2, group=mesh.get_group("pipeline"))
    wrapper = BucketedDDP(stages, group=mesh.get_group("data"))
    loss = stages.step(TOKENS.chunk(2)[part], TARGETS.chunk(2)[part], loss_of)
    wrapper.average(absent=())
    all_reduce(loss.view(1), mesh.get_group("data"))
    result = {name.removeprefix("layers."): p.grad for name, p in stages.named_parameters()}
    return furthest(loss, result, reference(torch.float64))


def test_data_parallelism_goes_with_it_on_four_ranks() -> None:
    assert max(run_ranks(combine_axes, world_size=4)) <= 1e-10


def measure() -> bool:
    layers = [nn.Linear(8, 512), nn.Linear(512, 512), nn.Linear(512, 8)]
    seconds = measure_layers(layers, torch.ones(256, 8))
    return len(Pipeline(layers, micro_batches=1, costs=seconds).layers) in (1, 2)


def test_stages_balance_by_measured_time() -> None:
    assert all(run_ranks(measure, world_size=2))
