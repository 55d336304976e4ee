"""Tensor parallelism computes what one process does, sends what its formula says, and needs every
message."""

import dataclasses
from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from labkit.costs import communication
from labkit.costs.transformer import TransformerShape
from labkit.nn.transformer import Transformer, language_model_loss
from labkit.parallel import tensor
from labkit.parallel.data_parallel import BucketedDDP
from labkit.parallel.overlap import BackgroundAllReduce
from labkit.parallel.sharding import FSDP, gather
from labkit.parallel.tensor import TensorParallel, tensor_parallel
from labkit.parallel.traffic import recorded_traffic
from tests.parallel.model_parallel_cases import (
    EXACT,
    TOLERANCES,
    Attempts,
    find_needless,
    find_refusals_that_fail,
    furthest,
    gradients,
    left_out,
)
from tests.parallel.shared_ranks import on_ranks

SHAPE = TransformerShape(d_model=24, d_ff=30, n_layers=2, n_heads=4, vocabulary=14)
TOKENS = (torch.arange(24) * 5 % 14).view(2, 12)
TARGETS = TOKENS.roll(3).masked_fill(torch.arange(24).view(2, 12) == 7, tensor.IGNORED)


def build(
    dtype: torch.dtype = torch.float64, *, seed: int = 0, shape: Any = SHAPE, **options: Any
) -> Transformer:
    torch.manual_seed(seed)
    torch.set_default_dtype(dtype)
    try:
        return Transformer(shape, context_length=12, **options)
    finally:
        torch.set_default_dtype(torch.float32)


@cache
def reference(dtype: torch.dtype = torch.float64, targets: Tensor = TARGETS) -> dict[str, Tensor]:
    model = build(dtype)
    logits = model(TOKENS)
    loss = language_model_loss(logits, targets)
    loss.backward()
    return {"loss": loss.detach(), "logits": logits.detach(), **gradients(model)}


def compute(model: TensorParallel, *, from_parts: bool = True) -> dict[str, Tensor]:
    with torch.set_grad_enabled(not from_parts):
        logits = model(TOKENS)
    loss = model(TOKENS, TARGETS) if from_parts else language_model_loss(logits, TARGETS)
    loss.backward()
    return {
        "loss": loss.detach(),
        "logits": logits.detach(),
        **model.gather_state_dict(gradients(model)),
    }


@on_ranks(1, 4, slow=(2,))
def test_parity() -> list[str]:
    """Loss from parts and from whole logits, checkpointed or not, over three transports, in turns
    in two dtypes."""
    wrong = []
    ways = (("auto", 0, True), ("torch", 1, True), ("point_to_point", 0, False))
    for place, (is_cut, (transport, segment, from_parts)) in enumerate(
        product((False, True), ways)
    ):
        for dtype in TOLERANCES if dist.get_world_size() == 2 else [[*TOLERANCES][place % 2]]:
            whole = build(dtype, seed=dist.get_rank(), checkpoint_segment=segment)
            model = tensor_parallel(whole, sequence_parallel=is_cut, transport=transport)
            expected = reference(dtype)
            result = compute(model, from_parts=from_parts)
            state = model.gather_state_dict()
            error = max(furthest(result, expected), furthest(state, build(dtype).state_dict()))
            if result.keys() != expected.keys() or not error <= TOLERANCES[dtype]:
                wrong.append(f"{dtype}, {is_cut}, {transport}: {error}")
    return wrong


@on_ranks(2)
def test_messages() -> list[str]:
    """Every message is needed: of the two blocks of a layer, embedding, output and loss, and of
    three cut norms."""
    n_calls = {False: 4 + 2 + 1, True: 8 + 4 + 1 + 3}
    return [
        text
        for is_cut, n in n_calls.items()
        for text in leave_out_each(is_cut)
        if text != f"{n} calls"
    ]


def leave_out_each(sequence_parallel: bool) -> list[str]:
    shape = dataclasses.replace(SHAPE, n_layers=1)

    def gather(ranks: Any, x: Tensor, sizes: Any = None) -> Tensor:
        lengths = sizes or [x.numel()] * dist.get_world_size()
        return torch.cat(
            [x.flatten() if r == dist.get_rank() else x.new_zeros(n) for r, n in enumerate(lengths)]
        )

    def scatter(ranks: Any, x: Tensor) -> Tensor:
        return x.reshape(dist.get_world_size(), x.shape[0], -1, x.shape[2])[dist.get_rank()].clone()

    def step() -> dict[str, Tensor]:
        model = tensor_parallel(build(shape=shape), sequence_parallel=sequence_parallel)
        loss = model(TOKENS, TARGETS)
        loss.backward()
        return {"loss": loss.detach(), **gradients(model)}

    expected = step()
    replaced = {"sum": lambda ranks, x: x, "gather": gather, "scatter_tokens": scatter}
    places = {(tensor._Ranks, name): function for name, function in replaced.items()}
    return find_needless(lambda: furthest(step(), expected), places)


@on_ranks(4)
def test_bytes() -> list[str]:
    """A rank sends in a step what the formula says, but for the notes that ranks agree by."""
    wrong = []
    p = dist.get_world_size()
    algorithm = communication.recursive_doubling  # these tensors are short
    for is_cut in (False, True):
        model = tensor_parallel(build(), sequence_parallel=is_cut)
        with recorded_traffic() as traffic:
            model(TOKENS, TARGETS).backward()
        calls = communication.tensor_parallel_calls(
            SHAPE, 2, 12, p, itemsize=8, sequence_parallel=is_cut
        )
        notes = [call.sent_bytes for call in traffic if call.dtype == "int64"]
        sent = sum(call.sent_bytes for call in traffic if call.is_payload)
        # two int64
        if notes != [16 * (p - 1)] or sent != communication.sent_bytes(
            calls, p, all_reduce=algorithm
        ):
            wrong.append(f"{is_cut}: {sent} bytes and notes of {notes}")
    return wrong


@on_ranks(3)
def test_models() -> list[str]:
    rank = dist.get_rank()
    narrow, fitting = (
        TransformerShape(24, d_ff, n_layers=1, n_heads=3, vocabulary=14) for d_ff in (2, 30)
    )
    attempts: Attempts = [
        ("heads that 3 ranks divide, got 4", lambda: tensor_parallel(build())),
        ("d_ff of 3", lambda: tensor_parallel(build(shape=narrow))),
        ("not cut, got Linear", lambda: tensor_parallel(nn.Linear(2, 2))),  # type: ignore[arg-type]
        (
            "a transport among auto",
            lambda: tensor_parallel(build(shape=fitting), transport="carrier pigeon"),
        ),
        (
            "on every rank",
            lambda: tensor_parallel(build(shape=fitting), sequence_parallel=rank == 1),
        ),
        (
            "on every rank",
            lambda: tensor_parallel(build(torch.float64 if rank else torch.float32, shape=fitting)),
        ),
    ]
    return find_refusals_that_fail(attempts)


@on_ranks(4)
def test_calls() -> list[str]:
    rank = dist.get_rank()
    model = tensor_parallel(build(), sequence_parallel=True)
    attempts: Attempts = [
        ("same tokens", lambda: model(TOKENS.roll(rank))),
        ("same tokens", lambda: model(TOKENS[:, : 12 - rank])),
        ("a sequence that 4 ranks divide", lambda: model(TOKENS[:, :-1])),
        ("int64 targets", lambda: model(TOKENS, TARGETS[:, 1:])),
        ("tokens from 0 to 13", lambda: model(TOKENS + 3)),
        ("tokens from 0 to 13", lambda: model(TOKENS, TARGETS + 3)),
        ("int64 tokens", lambda: model(TOKENS.float())),
        ("that is not cut", lambda: tensor_parallel(model.module)),
    ]
    return find_refusals_that_fail(attempts)


LOST: dict[str, dict[tuple[Any, str], Callable[..., Any]]] = {
    "no message": {},
    "a sum over tensor-parallel ranks": {(tensor._Ranks, "sum"): lambda ranks, x: x},
    "an average": {
        (BackgroundAllReduce, "start"): lambda *_: lambda: None,
        (gather, "reduce_scatter_round"): lambda *_: [],
    },
}


@on_ranks(4)
def test_axes() -> list[str]:
    """Two tensor-parallel groups of two ranks, each with half of the batch: BucketedDDP and FSDP
    average gradients."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    part = mesh.get_local_rank("data")
    targets = TOKENS.roll(3)
    wrong = []
    for is_cut, wrap, (lost, replaced) in product((False, True), (BucketedDDP, FSDP), LOST.items()):
        if replaced and is_cut == (wrap is FSDP):
            continue
        whole = build(seed=dist.get_rank())
        cut = tensor_parallel(whole, mesh.get_group("tensor"), sequence_parallel=is_cut)
        model: Any = wrap(cut, group=mesh.get_group("data"))
        with left_out(0, replaced):
            model(TOKENS[part : part + 1], targets[part : part + 1]).backward()
        local = {name.removeprefix("module."): grad for name, grad in gradients(model).items()}
        result = cut.gather_state_dict(local)
        error = furthest(result, reference(targets=targets))
        if wrap is FSDP:
            state = cut.gather_state_dict(model.consolidated_state_dict(to=None))
            wrong += [] if furthest(state, build().state_dict()) <= EXACT else ["parameters"]
        if len(result) != 21 or (error <= EXACT) == bool(replaced):
            wrong.append(f"{wrap.__name__}, {lost} lost: {error}")
    return wrong
