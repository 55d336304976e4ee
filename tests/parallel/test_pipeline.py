"""Pipelines compute what one process does, in every schedule; schedules end, and hold and idle what
they say."""

import copy
import time
import warnings
from collections import deque
from functools import cache, partial
from itertools import chain, product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy, mse_loss

from labkit.costs import communication
from labkit.parallel.losses import IGNORED, summed_loss
from labkit.parallel.messages import gather_json
from labkit.parallel.pipeline import Pipeline, measure_layers
from labkit.parallel.pipeline_messages import HEADER_BYTES
from labkit.parallel.pipeline_schedule import (
    Task,
    balance,
    make_schedule,
    peak_activations,
    plan_rank,
    simulate,
)
from labkit.parallel.tensor import tensor_parallel
from labkit.parallel.traffic import recorded_traffic
from tests.parallel.model_parallel_cases import (
    EXACT,
    TOLERANCES,
    Attempts,
    TiedHead,
    assert_refused_everywhere,
    furthest,
    gradients,
    masked_mean,
)
from tests.parallel.shared_ranks import on_ranks, shared_mesh

TOKENS = (torch.arange(24) * 5 % 7).view(8, 3)
TARGETS = TOKENS.roll(2)
SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2}


def block(hidden: int) -> nn.Module:
    return nn.Sequential(nn.Linear(6, hidden), nn.Tanh(), nn.Linear(hidden, 6))


def build(dtype: torch.dtype = torch.float64, seed: int = 0) -> list[nn.Module]:
    """Nine layers of unlike size, the last tied to the first."""
    torch.manual_seed(seed)
    embedding = nn.Embedding(7, 6)
    layers = [embedding, *map(block, (5, 9, 2, 30, 3, 4, 8)), TiedHead(embedding)]
    return [layer.to(dtype) for layer in layers]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, -2), targets.flatten())


def inputs_from(start: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    activations = torch.randn(8, 3, 6, dtype=torch.float64, generator=generator)
    return activations.to(dtype).requires_grad_() if start else TOKENS


@cache
def reference(dtype: torch.dtype = torch.float64, start: int = 0) -> dict[str, Tensor]:
    """Loss and gradients of one process, and that of the activations if they are the inputs."""
    model = nn.Sequential(*build(dtype)[start:])
    inputs = inputs_from(start, dtype)
    loss = loss_of(model(inputs), TARGETS)
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters(remove_duplicate=False)}
    return {"loss": loss.detach(), **grads, **({"inputs": inputs.grad} if start else {})}


def run_step(stages: Pipeline, inputs: Tensor = TOKENS, steps: int = 1) -> dict[str, Tensor]:
    """Loss and gradients of this rank's layers, by the names of the whole list."""
    stages.zero_grad()
    for _ in range(steps):
        loss = stages.step(inputs, TARGETS, loss_of)
    grads = {name.removeprefix("layers."): grad / steps for name, grad in gradients(stages).items()}
    has_inputs = inputs.requires_grad and stages.rank == 0
    return {"loss": loss, **grads, **({"inputs": inputs.grad / steps} if has_inputs else {})}


CASES: list[tuple[torch.dtype, int, dict[str, Any]]] = [
    (torch.float64, 0, {}),
    (torch.float32, 0, {"recompute": True, "transport": "point_to_point"}),
    (torch.float64, 1, {"costs": [1, 5, 1, 1, 2, 1, 1, 1]}),
]
"""Dtype, first layer, which with 1 takes activations as inputs, and options."""


@on_ranks(3, slow=(1, 2, 4))
def test_parity() -> None:
    """Every schedule and number of micro-batches, with the cases in turns."""
    for place, (schedule, number) in enumerate(product(SCHEDULES, (1, 2, 4, 8))):
        dtype, start, options = CASES[place % 3]
        layers = build(dtype, dist.get_rank())[start:]
        stages = Pipeline(layers, schedule=schedule, micro_batches=number, **options)
        result = run_step(stages, inputs_from(start, dtype), steps=2)
        order = stages.schedule[stages.rank]
        assert len(result) >= 2
        assert furthest(result, reference(dtype, start)) <= TOLERANCES[dtype], (schedule, number)
        assert [each.task for each in stages.times] == order
        assert stages.peak_held == peak_activations(order)


@on_ranks(4)
def test_bytes() -> None:
    """A rank sends in a step what the formula says and a header each, not counting agreement."""
    p = dist.get_world_size()
    rank = dist.get_rank()
    for schedule, chunks in SCHEDULES.items():
        pipe = Pipeline(build(), schedule=schedule, micro_batches=4)
        pipe.step(TOKENS, TARGETS, loss_of)  # ranks learn what to expect
        with recorded_traffic() as traffic:
            pipe.step(TOKENS, TARGETS, loss_of)
        sent = sum(call.sent_bytes for call in traffic if call.is_payload)
        tied = 7 * 6 * 8 if rank in (0, p - 1) else 0
        stages = range(rank, chunks * p, p)
        last = chunks * p - 1
        # activations go to one, gradients to another
        neighbors = sum((stage > 0) + (stage < last) for stage in stages)
        assert sent == (2 * 3 * 6 * 8 + HEADER_BYTES) * neighbors * 4 + tied, schedule


@on_ranks(2)
def test_targets_that_do_not_count() -> None:
    """The loss is the mean over all targets that count, and zero without any."""
    targets = TARGETS.clone()  # micro-batches have 5, 0, 1 and 2 that count
    targets.view(-1)[[*range(5, 17), *range(20, 24)]] = IGNORED
    model = nn.Sequential(*build())
    model[2][0].weight.grad = torch.ones_like(model[2][0].weight)
    expected = masked_mean(model(TOKENS), targets)
    (2 * expected).backward()
    stages = Pipeline(build(), micro_batches=4)
    if "2" in stages.layers:  # an earlier gradient is not divided by the number of targets
        stages.layers["2"][0].weight.grad = torch.ones_like(stages.layers["2"][0].weight)
    for _ in range(2):
        loss = stages.step(TOKENS, targets, summed_loss)
    grads = {name: p.grad for name, p in model.named_parameters(remove_duplicate=False)}
    result = {name.removeprefix("layers."): grad for name, grad in gradients(stages).items()}
    assert furthest({"loss": loss, **result}, {"loss": expected.detach(), **grads}) <= EXACT
    stages.zero_grad()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        stages.step(TOKENS, targets, loss_of)
    # of a mean of means
    assert ["summed_loss" in str(each.message) for each in caught] == [True]
    stages.zero_grad()
    assert stages.step(TOKENS, torch.full_like(targets, IGNORED), summed_loss) == 0
    assert not any(grad.any() for grad in gradients(stages).values())


@on_ranks(2)
def test_no_gradient() -> None:
    """A parameter has a gradient only if it has one in one process."""

    def freeze(layers: list[nn.Module]) -> None:
        layers[0].weight.requires_grad_(False)

    def cut(layers: list[nn.Module]) -> None:
        layers[5].register_forward_hook(lambda module, inputs, output: output.detach())

    for change in (freeze, cut):
        layers = build()
        change(layers)
        model = nn.Sequential(*layers)
        loss_of(model(TOKENS), TARGETS).backward()
        stages = Pipeline(layers := build(), micro_batches=4)
        change(layers)
        result = run_step(stages)
        expected = {
            name: p.grad
            for name, p in model.named_parameters(remove_duplicate=False)
            if p.grad is not None
        }
        own = {n for n, _ in stages.named_parameters(remove_duplicate=False)}
        names = {name for name in expected if f"layers.{name}" in own}
        assert {*result} - {"loss"} == names
        assert furthest(result, reference() | expected) <= EXACT
    stages = Pipeline(build(), micro_batches=4)
    with torch.no_grad():
        stages.step(TOKENS, TARGETS, loss_of)
    assert gradients(stages) == {}


@on_ranks(2, slow=(3,))
def test_errors() -> None:
    """One rank's error ends the step on all, before a time-out and with its text; the next step
    works."""

    def raises(logits: Tensor, targets: Tensor) -> Tensor:
        raise ZeroDivisionError("no loss")

    def in_backward(module: nn.Module, inputs: Any, output: Tensor) -> None:
        def fail(gradient: Tensor) -> None:
            raise ZeroDivisionError("in backward")

        output.register_hook(fail)

    def as_tuple(module: nn.Module, inputs: Any, output: Tensor) -> tuple[Tensor, Tensor]:
        return output, output

    def unreduced(logits: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")

    cases: list[tuple[str, Any, Any]] = [
        ("no loss", None, raises),
        ("in backward", in_backward, loss_of),
        ("one dense float tensor", as_tuple, loss_of),
        ("a loss of one", None, unreduced),
    ]
    stages = Pipeline(layers := build(), micro_batches=4)
    # the last layer of the first stage: its output goes to another rank
    border = layers[stages.stages[0][-1]]
    for text, hook, loss in cases:
        handle = border.register_forward_hook(hook) if hook else None
        start = time.perf_counter()
        stages.zero_grad()
        with pytest.raises((ValueError, ZeroDivisionError), match=text):
            stages.step(TOKENS, TARGETS, loss)
        assert time.perf_counter() - start < 30
        assert gradients(stages) == {}
        if handle:
            handle.remove()
        assert furthest(run_step(stages), reference()) <= EXACT, f"after {text}"


@on_ranks(2)
def test_scaler() -> None:
    """A scaler skips, and changes its scale, as in one process, though one stage overflows."""
    model = nn.Sequential(*build())
    stages = Pipeline(layers := build(), micro_batches=4)
    scales = []
    for each in (model, stages):
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            # in the last stage of the pipeline
            last = model[7][0].weight if each is model else layers[7][0].weight
            handle = last.register_hook(lambda grad: grad * float("inf")) if step == 1 else None
            if each is model:
                scaler.scale(loss_of(model(TOKENS), TARGETS)).backward()
            else:
                stages.step(TOKENS, TARGETS, loss_of, scaler=scaler)
            if handle is not None:
                handle.remove()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
    assert furthest(stages.gather_state_dict(), model.state_dict()) <= EXACT
    only_first = torch.amp.GradScaler("cpu") if dist.get_rank() == 0 else None
    with pytest.raises(ValueError, match="the scale of the loss"):
        stages.step(TOKENS, TARGETS, loss_of, scaler=only_first)
    assert scales[:4] == scales[4:] == [64, 32, 32, 64]


@on_ranks(2)
def test_an_overflow_by_the_number_of_targets() -> None:
    """The last stage's gradient overflows when it is divided by a small count: both ranks skip."""
    layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
    nn.init.constant_(layers[1].weight, 1e-30)
    stages = Pipeline(layers, micro_batches=4)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    optimizer = torch.optim.SGD(stages.parameters(), lr=0.1)
    targets = torch.zeros(8, dtype=torch.int64)
    stages.step(
        torch.ones(8, 4), targets, lambda y, _: (1e38 * y.sum(), torch.tensor(0.25)), scaler=scaler
    )
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 0.5


@on_ranks(2)
def test_other_shapes() -> None:
    """Steps may differ in dtype, in autocast and in shape."""
    stages = Pipeline(build(), micro_batches=4)
    run_step(stages)
    with torch.autocast("cpu", torch.bfloat16):
        run_step(stages)
    stages.step(TOKENS[:4, :2], TARGETS[:4, :2], loss_of)
    stages.float()
    assert furthest(run_step(stages), reference()) <= TOLERANCES[torch.float32]
    stages.double()
    assert furthest(run_step(stages), reference()) <= TOLERANCES[torch.float32]


def build_with_statistics() -> list[nn.Module]:
    torch.manual_seed(0)
    return [
        nn.BatchNorm1d(6),
        nn.Linear(6, 6),
        nn.Sequential(nn.BatchNorm1d(6), nn.Dropout(0.5)),
        nn.Linear(6, 2),
    ]


@on_ranks(2)
def test_statistics() -> None:
    """Recomputing counts a batch once, and measuring layers changes nothing."""
    x = torch.randn(16, 6)
    states = []
    for recompute in (False, True):
        torch.manual_seed(0)
        stages = Pipeline(build_with_statistics(), micro_batches=4, recompute=recompute)
        stages.step(x, x[:, :2], mse_loss)
        states.append({name: buffer.clone() for name, buffer in stages.named_buffers()})
    assert furthest(states[0], states[1]) == 0
    layers = build_with_statistics()
    generator = torch.get_rng_state()
    measure_layers(layers, x)
    assert int(layers[0].num_batches_tracked) == 0
    assert torch.equal(generator, torch.get_rng_state())


@on_ranks(2)
def test_dropout() -> None:
    """With one seed, stages drop other positions, and the seed decides which."""
    torch.manual_seed(0)
    stages = Pipeline([nn.Dropout(), nn.Dropout()], micro_batches=1)
    kept = []
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, inputs, output: (
            kept.append((output > 0).tolist()) if isinstance(module, nn.Dropout) else None
        )
    )
    for _ in range(2):
        torch.manual_seed(1)
        stages.step(torch.ones(1, 99), torch.ones(1, 99), mse_loss)
    handle.remove()
    # Stage 1 has only what stage 0 has left.
    by_rank = gather_json(kept[0][0])
    different = sum(first != second for first, second in zip(*by_rank, strict=True))
    assert kept[0] == kept[1]
    assert different > 10


@on_ranks(2)
def test_evaluate_and_states() -> None:
    """Evaluation gives one process's outputs on all ranks; a state is saved and loaded whole."""
    model = nn.Sequential(*build_with_statistics()).double()
    other = nn.Sequential(*build_with_statistics()).double()
    inputs = torch.randn(16, 6, dtype=torch.float64)
    model(inputs)  # running statistics
    for schedule in ("1f1b", "interleaved"):
        stages = Pipeline([*other.children()], schedule=schedule, micro_batches=4)
        stages.load_state_dict(model.state_dict())
        stages.layers.train(mode=stages.rank == 0)
        for batch in (inputs, inputs[:3], inputs[:5]):
            expected = model.eval()(batch).detach()
            with torch.inference_mode(len(batch) == 3):
                error = furthest({"": stages.evaluate(batch)}, {"": expected})
            assert error <= EXACT, (schedule, len(batch))
        assert {module.training for module in stages.layers.modules()} == {stages.rank == 0}
        state = stages.gather_state_dict()
        assert [*state] == [*model.state_dict()]
        assert furthest(state, model.state_dict()) == 0
    cut = dict(list(state.items())[:-1])
    attempts: Attempts = [
        ("3.bias", lambda: stages.load_state_dict(cut)),
        ("no such name", lambda: stages.load_state_dict(state | {"9.weight": state["1.weight"]})),
        ("1.weight", lambda: stages.load_state_dict(state | {"1.weight": state["1.bias"]})),
        ("expected a batch", lambda: stages.evaluate(inputs[:0])),
    ]
    with pytest.raises(TypeError, match="gather_state_dict"):
        copy.deepcopy(stages)
    assert_refused_everywhere(attempts)
    if "1" in stages.layers:
        stages.layers["1"].register_parameter("added", nn.Parameter(torch.ones(2)))
    state = stages.gather_state_dict()
    stages.load_state_dict(state)
    assert [*state] == [*model.state_dict(), "1.added"]


@settings(deadline=None, max_examples=30)
@given(st.sampled_from(list(SCHEDULES)), st.integers(1, 9), st.integers(1, 24), st.integers(2, 5))
def test_schedules_end_and_neighbors_agree(
    schedule: str, ranks: int, micro_batches: int, chunks: int
) -> None:
    """Rendezvous messages, as large ones are, end in the order of every rank's plan; peaks and idle
    shares hold."""
    chunks = chunks if schedule == "interleaved" else 1
    orders = make_schedule(schedule, ranks, micro_batches, chunks=chunks)
    tasks = [
        Task(s, kind, k)
        for s in range(ranks * chunks)
        for kind in "FB"
        for k in range(micro_batches)
    ]
    assert sorted(chain(*orders)) == sorted(tasks)
    pass_rendezvous([plan_rank(orders, rank) for rank in range(ranks)])
    group = -(-micro_batches // max(1, micro_batches // ranks))
    for rank, order in enumerate(orders):
        ahead = {"gpipe": micro_batches, "1f1b": ranks - 1 - rank}
        most = ahead.get(schedule, 2 * (ranks - 1 - rank) + (chunks - 1) * group) + 1
        assert peak_activations(order) == min(chunks * micro_batches, most)
    if micro_batches >= ranks:
        idle = 1 - 3 * micro_batches * chunks / max(times[-1].end_s for times in simulate(orders))
        assert idle == pytest.approx(
            communication.pipeline_idle_share(ranks, micro_batches, chunks=chunks)
        )


def pass_rendezvous(plans: list[list[tuple[bool, Task]]]) -> None:
    """Carry the plans out with messages for which both sides wait; no task comes before its
    input."""
    queues = [deque(plan) for plan in plans]
    done = set()
    sides = min(2, len(plans))
    while any(queues):
        heads = [queue[0] if queue else None for queue in queues]
        ready = [
            r
            for r, head in enumerate(heads)
            if head and (not head[0] or heads.count(head) == sides)
        ]
        assert ready, f"all wait: {heads}"
        for rank in ready:
            is_message, task = queues[rank].popleft()
            if not is_message and task.kind == "F" and task.stage:
                assert (True, task._replace(stage=task.stage - 1)) in done
        done.update(heads[rank] for rank in ready)


def test_stages_are_balanced_and_a_task_that_would_wait_forever_is_named() -> None:
    with pytest.raises(ValueError, match=r"Task.*'B'"):
        simulate([[Task(0, "B", 0), Task(0, "F", 0)]])
    assert balance([1, 1, 1, 3], 2) == [range(3), range(3, 4)]
    assert balance([5, 1, 1, 1, 1, 1], 3) == [range(1), range(1, 3), range(3, 6)]
    assert balance([0, 0, 0], 3) == [range(1), range(1, 2), range(2, 3)]


@on_ranks(3)
def test_refusals() -> None:
    rank = dist.get_rank()
    good = Pipeline(build(), micro_batches=4)

    def freeze_a_copy() -> None:
        if rank == 0:
            good.layers["0"].weight.requires_grad_(False)
        good.step(TOKENS, TARGETS, loss_of)

    attempts: Attempts = [
        ("0 micro-batches", lambda: Pipeline(build(), micro_batches=0)),
        ("expected the same", lambda: Pipeline(build(), micro_batches=1 + rank)),
        ("among gpipe", lambda: Pipeline(build(), micro_batches=1, schedule="best")),
        ("3 layers or more", lambda: Pipeline(build()[:2], micro_batches=1)),
        ("expected the same", lambda: Pipeline(build()[: 9 - rank], micro_batches=1)),
        ("with a cost each", lambda: Pipeline(build(), micro_batches=1, costs=[1.0])),
        (
            "a batch that 4 micro-batches divide",
            lambda: good.step(TOKENS[:7], TARGETS[:7], loss_of),
        ),
        ("got (4, 3) inputs", lambda: good.step(TOKENS[: 8 - 4 * (rank == 1)], TARGETS, loss_of)),
        ("a batch that 4 micro-batches divide", lambda: good.step(TOKENS, TARGETS[:4], loss_of)),
        ("expected the same", lambda: good.step(torch.full((8, 3), rank / 2), TARGETS, loss_of)),
        (
            "inputs without a graph",
            lambda: good.step(inputs_from(1, torch.float64) * 2, TARGETS, loss_of),
        ),
        (
            "targets without a gradient",
            lambda: good.step(TOKENS, inputs_from(1, torch.float64), loss_of),
        ),
        ("make what has it a layer", lambda: good.step(TOKENS, TARGETS, nn.PReLU())),
        ("layers.8.weight, which are tied", freeze_a_copy),
    ]
    assert_refused_everywhere(attempts)


@on_ranks(4)
def test_a_batch_that_one_of_two_pipelines_refuses_is_refused_by_both() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipeline"))
    stages = Pipeline(build(), micro_batches=2, group=mesh.get_group("pipeline"))
    n_targets = 4 - mesh.get_local_rank("data")
    batch = TOKENS[:4], TARGETS[:n_targets]
    step = partial(stages.step, *batch, summed_loss, data_group=mesh.get_group("data"))
    assert_refused_everywhere([("2 micro-batches divide", step)])


def build_cut(rank: int, tensor_group: dist.ProcessGroup) -> list[nn.Module]:
    """The nine layers, of which the blocks are cut over two ranks."""
    first, *blocks, last = build(seed=rank)
    plan = {"0": "rows", "2": "columns"}
    return [first, *[tensor_parallel(each, tensor_group, plan=plan) for each in blocks], last]


@on_ranks(4)
def test_stages_of_cut_layers_get_one_batch() -> None:
    """Ranks with parts of a layer have the values of one process, and refuse other batches."""
    mesh = shared_mesh((2, 2), ("pipeline", "tensor"))
    rank = dist.get_rank()
    group = mesh.get_group("pipeline")
    tensor_group = mesh.get_group("tensor")
    stages = Pipeline(build_cut(rank, tensor_group), micro_batches=4, group=group)
    is_other_part = mesh.get_local_rank("tensor") == 1

    def step(*, changes_inputs: bool, changes_targets: bool) -> None:
        inputs = (TOKENS + changes_inputs) % 7
        stages.step(inputs, (TARGETS + changes_targets) % 7, loss_of)

    def step_on_activations() -> None:
        """As with sequence parallelism, whose ranks have other tokens outside of the layers."""
        blocks = Pipeline(build_cut(rank, tensor_group)[1:], micro_batches=4, group=group)
        inputs = torch.full((8, 3, 6), float(is_other_part), dtype=torch.float64)
        blocks.step(inputs.requires_grad_(), TARGETS, loss_of)

    def freeze_one() -> None:
        layers = build_cut(rank, tensor_group)
        layers[0].weight.requires_grad_(not is_other_part)
        Pipeline(layers, micro_batches=4, group=group)

    attempts: Attempts = [
        # one pipeline of two, and one rank of four
        *[
            ("expected the same inputs and targets", partial(step, **changes))
            for is_changed in (is_other_part, rank == 3)
            for changes in (
                {"changes_inputs": is_changed, "changes_targets": False},
                {"changes_inputs": False, "changes_targets": is_changed},
            )
        ],
        ("expected the same inputs", lambda: stages.evaluate((TOKENS + is_other_part) % 7)),
        ("4 micro-batches divide", lambda: stages.step(TOKENS[is_other_part:], TARGETS, loss_of)),
        ("expected the same inputs", step_on_activations),
    ]
    assert_refused_everywhere(attempts)
    assert gradients(stages) == {}
    result = run_step(stages)
    whole = {name: value for name, value in result.items() if name in ("loss", "0.weight")}
    assert furthest(whole, reference()) <= EXACT
    outputs = nn.Sequential(*build())(TOKENS).detach()
    assert furthest({"": stages.evaluate(TOKENS)}, {"": outputs}) <= EXACT
    assert_refused_everywhere([("expected the same pipeline", freeze_one)])


@on_ranks(2)
def test_balance() -> None:
    """Stages are balanced by the costs that are given."""
    layers = [nn.Linear(2, 2) for _ in range(3)]
    assert gather_json(len(Pipeline(layers, micro_batches=1, costs=[1, 1, 2]).layers)) == [2, 1]


@on_ranks(2)
def test_a_layer_that_is_cut_over_the_ranks_of_the_pipeline_is_refused() -> None:
    """Each rank has a part of it, and only the rank with its stage would compute it."""
    borrowed = tensor_parallel(nn.Sequential(nn.Linear(6, 8)), plan={"0": "rows"}).module[0]
    make = partial(Pipeline, [borrowed, nn.Linear(8, 6)], micro_batches=1)
    assert_refused_everywhere([("0.weight is cut over ranks [0, 1]", make)])
