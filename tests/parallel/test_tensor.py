"""Tensor parallelism computes what one process does, sends what its formula says, and needs every message."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from labkit.costs import communication
from labkit.costs.transformer import TransformerShape
from labkit.nn.transformer import Transformer, language_model_loss
from labkit.parallel import tensor
from labkit.parallel.agreement import NOTE_BYTES
from labkit.parallel.collectives import all_reduce
from labkit.parallel.data_parallel import BucketedDDP
from labkit.parallel.launch import run_ranks
from labkit.parallel.sharding import FSDP
from labkit.parallel.tensor import TensorParallel, tensor_parallel
from labkit.parallel.traffic import recorded_traffic

pytestmark = pytest.mark.usefixtures("workers_travel_by_value")

SHAPE = TransformerShape(d_model=24, d_ff=30, n_layers=2, n_heads=4, vocabulary=14)
TOKENS = (torch.arange(24) * 5 % 14).view(2, 12)
TARGETS = TOKENS.roll(3).masked_fill(torch.arange(24).view(2, 12) == 7, tensor.IGNORED)
FLOAT32 = 128 * torch.finfo(torch.float32).eps


def build(dtype: torch.dtype = torch.float64, *, seed: int = 0, **options: Any) -> Transformer:
    torch.manual_seed(seed)
    torch.set_default_dtype(dtype)
    try:
        return Transformer(SHAPE, context_length=12, **options)
    finally:
        torch.set_default_dtype(torch.float32)


def differences(values: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    assert values.keys() == expected.keys()
    return {
        name: float((values[name] - expected[name]).abs().max() / (1 + each.abs().max()))
        for name, each in expected.items()
    }


def reference(dtype: torch.dtype) -> dict[str, Tensor]:
    model = build(dtype)
    logits = model(TOKENS)
    loss = language_model_loss(logits, TARGETS)
    loss.backward()
    return {"loss": loss.detach(), "logits": logits.detach(), **gradients(model)}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def compute(model: TensorParallel, *, with_targets: bool = True) -> dict[str, Tensor]:
    with torch.set_grad_enabled(not with_targets):
        logits = model(TOKENS)
    loss = model(TOKENS, TARGETS) if with_targets else language_model_loss(logits, TARGETS)
    loss.backward()
    return {"loss": loss.detach(), "logits": logits.detach(), **model.gather_state_dict(gradients(model))}


def check_parity() -> list[str]:
    """Loss from parts and from whole logits, checkpointed or not, two dtypes and three transports."""
    wrong = []
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, FLOAT32)):
        expected = reference(dtype)
        for sequence_parallel in (False, True):
            for transport, segment, with_targets in (
                ("auto", 0, True),
                ("torch", 1, True),
                ("point_to_point", 0, False),
            ):
                whole = build(dtype, seed=dist.get_rank(), checkpoint_segment=segment)
                options = {"sequence_parallel": sequence_parallel, "transport": transport}
                model = tensor_parallel(whole, **options)
                found = differences(compute(model, with_targets=with_targets), expected)
                found |= differences(model.gather_state_dict(), build(dtype).state_dict())
                wrong += [
                    f"{dtype} {options}: {name} {error}" for name, error in found.items() if not error <= tolerance
                ]
    return wrong


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_it_computes_what_one_process_does(world_size: int) -> None:
    assert run_ranks(check_parity, world_size=world_size) == [[]] * world_size


@contextmanager
def without_collective(number: int) -> Iterator[list[str]]:
    """Leave one collective of this rank's parts out, on every rank; yield the names of those that would have run."""
    names: list[str] = []
    originals = {name: getattr(tensor._Ranks, name) for name in ("sum", "gather", "scatter_tokens")}

    def call(name: str, ranks: Any, x: Tensor, *sizes: Any) -> Tensor:
        names.append(name)
        if len(names) - 1 != number:
            return originals[name](ranks, x, *sizes)
        if name == "sum":
            return x
        if name == "scatter_tokens":
            return x.reshape(dist.get_world_size(), x.shape[0], -1, x.shape[2])[dist.get_rank()].clone()
        lengths = sizes[0] if sizes else [x.numel()] * dist.get_world_size()
        return torch.cat([x.reshape(-1) if r == dist.get_rank() else x.new_zeros(n) for r, n in enumerate(lengths)])

    for name in originals:
        setattr(tensor._Ranks, name, partial_method(call, name))
    try:
        yield names
    finally:
        for name, original in originals.items():
            setattr(tensor._Ranks, name, original)


def partial_method(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    return lambda self, *args: function(name, self, *args)


def find_needless_collectives(sequence_parallel: bool) -> list[str]:
    """Name the collectives of a step without which the result is right."""
    expected, needless, number, total = reference(torch.float64), [], 0, 1
    expected.pop("logits")
    while number < total:
        with without_collective(number) as names:
            model = tensor_parallel(build(), sequence_parallel=sequence_parallel)
            loss = model(TOKENS, TARGETS)
            loss.backward()
        found = {"loss": loss.detach(), **model.gather_state_dict(gradients(model))}
        if max(differences(found, expected).values()) <= 1e-10:
            needless.append(f"{number}: {names[number]}")
        number, total = number + 1, len(names)
    return [*needless, f"{total} collectives"]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_every_message_is_needed(sequence_parallel: bool) -> None:
    """Enter and leave 2 L blocks, output, embedding and loss; with sequence parallelism, the norms' gradients."""
    total = 8 + 3 if not sequence_parallel else 16 + 5 + 5
    assert run_ranks(find_needless_collectives, sequence_parallel, world_size=2) == [[f"{total} collectives"]] * 2


def count_bytes(sequence_parallel: bool) -> float:
    """Bytes that this rank sends in a step, but for the notes that it agrees by, and those of the formula."""
    p, algorithm = dist.get_world_size(), communication.recursive_doubling  # these tensors are short
    model = tensor_parallel(build(), sequence_parallel=sequence_parallel)
    with recorded_traffic() as traffic:
        model(TOKENS, TARGETS).backward()
    calls = communication.tensor_parallel_calls(SHAPE, 2, 12, p, itemsize=8, sequence_parallel=sequence_parallel)
    assert [call.sent_bytes for call in traffic if call.dtype == "int64"] == [NOTE_BYTES * (p - 1)]
    sent = sum(call.sent_bytes for call in traffic if call.dtype != "int64")
    return sent - communication.sent_bytes(calls, p, all_reduce=algorithm)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_step_sends_what_the_formula_says(sequence_parallel: bool) -> None:
    assert run_ranks(count_bytes, sequence_parallel, world_size=4) == [0] * 4


def refuse() -> list[str]:
    """Return this rank's errors; a collective after each shows that no message was left behind."""
    rank, p = dist.get_rank(), dist.get_world_size()
    short, fitting = (TransformerShape(24, d_ff, n_layers=1, n_heads=p, vocabulary=14) for d_ff in (2, 30))
    attempts: list[Callable[[], object]] = [
        lambda: tensor_parallel(Transformer(short, context_length=12)),
        lambda: tensor_parallel(nn.Linear(2, 2)),  # type: ignore[arg-type]
        lambda: tensor_parallel(Transformer(fitting, context_length=12), sequence_parallel=rank == 1),
        lambda: tensor_parallel(Transformer(fitting, context_length=12), transport="carrier pigeon"),
        lambda: tensor_parallel(Transformer(fitting, context_length=12).to(torch.float64 if rank else torch.float32)),
    ]
    if SHAPE.n_heads % p:
        attempts.append(lambda: tensor_parallel(build()))
    else:
        model = tensor_parallel(build(), sequence_parallel=True)
        attempts += [
            lambda: model(TOKENS.roll(rank)),
            lambda: model(TOKENS[:, : 12 - rank]),
            lambda: model(TOKENS[:, :-1]),
            lambda: model(TOKENS, TARGETS[:, 1:]),
            lambda: model(TOKENS + 3),
            lambda: model(TOKENS, TARGETS + 3),
            lambda: model(TOKENS.float()),
            lambda: tensor_parallel(model.module),
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


def test_what_cannot_be_cut_is_refused_in_one_line_on_all_ranks() -> None:
    common = ["d_ff of", "is not cut, got Linear", "on every rank", "a transport among auto", "on every rank"]
    calls = ["same tokens", "same tokens", "a sequence that 4 ranks divide", "int64 targets", "tokens from 0 to 13"]
    calls += ["tokens from 0 to 13", "expected int64 tokens", "that is not cut"]
    for world_size, expected in ((3, [*common, "heads that 3 ranks divide, got 4"]), (4, [*common, *calls])):
        for texts in run_ranks(refuse, world_size=world_size):
            for text, part in zip(texts, expected, strict=True):
                assert part in text
                assert "\n" not in text


def combine_axes() -> list[str]:
    """Two tensor-parallel groups of two ranks, each with half of the batch: BucketedDDP and FSDP average gradients."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    part, wrong = mesh.get_local_rank("data"), []
    model: Any = build()
    language_model_loss(model(TOKENS), TOKENS.roll(3)).backward()
    expected = gradients(model)
    for sequence_parallel in (False, True):
        for wrap in (BucketedDDP, FSDP):
            cut = tensor_parallel(
                build(seed=dist.get_rank()), mesh.get_group("tensor"), sequence_parallel=sequence_parallel
            )
            model = wrap(cut, group=mesh.get_group("data"))
            model(TOKENS[part : part + 1], TOKENS.roll(3)[part : part + 1]).backward()
            local = gradients(model)
            whole = {name.replace("module.module.", "module."): whole_tensor(grad) for name, grad in local.items()}
            found = differences(cut.gather_state_dict(whole), expected)
            wrong += [f"{wrap.__name__}: {name} {error}" for name, error in found.items() if not error <= 1e-10]
            if wrap is FSDP:
                state = cut.gather_state_dict(model.consolidated_state_dict(to=None))
                wrong += [name for name, value in build().state_dict().items() if not torch.equal(state[name], value)]
    return wrong


def whole_tensor(value: Any) -> Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def test_data_and_sharding_go_with_it_on_four_ranks() -> None:
    assert run_ranks(combine_axes, world_size=4) == [[]] * 4
