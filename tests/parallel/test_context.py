"""Attention over a sequence that is cut over ranks computes what one process does, and needs every
message."""

import copy
import gc
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from labkit.costs import communication
from labkit.costs.transformer import TransformerShape
from labkit.nn import attention_implementations
from labkit.nn.attention import naive_attention
from labkit.nn.transformer import Transformer
from labkit.parallel import context, context_attention
from labkit.parallel.context import LAYOUTS, context_parallel, gather_attention, ring_attention
from labkit.parallel.context import join_sequence as join
from labkit.parallel.context import split_sequence as split
from labkit.parallel.data_parallel import BucketedDDP
from labkit.parallel.losses import IGNORED, mean_loss, next_tokens
from labkit.parallel.traffic import recorded_traffic
from tests.nn.against_oracle import poisoned_memory
from tests.parallel.model_parallel_cases import (
    EXACT,
    TOLERANCES,
    Attempts,
    assert_refused_everywhere,
    furthest,
    gradients,
    masked_mean,
)
from tests.parallel.shared_ranks import on_ranks

METHODS = {"ring": ring_attention, "gather": gather_attention}
SHAPE = TransformerShape(d_model=16, d_ff=24, n_layers=2, n_heads=4, vocabulary=11)
TOKENS = (torch.arange(24) * 5 % 11).view(1, 24)


def inputs(dtype: torch.dtype, length: int) -> list[Tensor]:
    """q, k, v and the output's gradient; k and v have two heads for four."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, heads, length, 8) for heads in (4, 2, 2, 4)]
    return [
        torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes
    ]


def differentiate(attention: Callable[..., Tensor], tensors: list[Tensor]) -> dict[str, Tensor]:
    """Output and gradients, by name."""
    q, k, v = (x.detach().requires_grad_() for x in tensors[:3])
    output = attention(q, k, v)
    output.backward(tensors[3])
    return {"output": output.detach(), "q": q.grad, "k": k.grad, "v": v.grad}


def reference(dtype: torch.dtype, length: int, *, is_causal: bool = True) -> dict[str, Tensor]:
    """Output and gradients of one process, in float64 from the same values."""
    wide = [x.double() for x in inputs(dtype, length)]
    return differentiate(lambda q, k, v: naive_attention(q, k, v, is_causal), wide)


def attend(method: str, dtype: torch.dtype, length: int, **options: Any) -> dict[str, Tensor]:
    """Output and gradients of this rank's positions, joined to the whole sequence."""
    layout = options["layout"]
    parts = [split(x, 2, layout=layout) for x in inputs(dtype, length)]
    # as attention layers lay them out
    parts = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in parts]
    result = differentiate(lambda q, k, v: METHODS[method](q, k, v, **options), parts)
    assert {x.dtype for x in result.values()} == {dtype}
    return {name: join(x, 2, layout=layout) for name, x in result.items()}


@on_ranks(3, slow=(1, 2, 4))
def test_parity() -> None:
    """Every method, layout and mask, over both transports in float64; with a mask the ring in other
    dtypes, too."""
    p = dist.get_world_size()
    routes = [("ring", "auto"), ("gather", "auto"), ("ring", "point_to_point")]
    for dtype, tolerance in {
        **TOLERANCES,
        torch.bfloat16: 4 * torch.finfo(torch.bfloat16).eps,
    }.items():
        for is_causal, (layout, length) in product(
            (True, False), (("zigzag", 6 * p), ("contiguous", 5 * p))
        ):
            expected = reference(dtype, length, is_causal=is_causal)
            for method, transport in routes if dtype == torch.float64 else [routes[is_causal]]:
                options = {"is_causal": is_causal, "layout": layout, "transport": transport}
                with poisoned_memory():
                    result = attend(method, dtype, length, **options)
                assert furthest(result, expected) <= tolerance, (method, dtype, options)


def build() -> Transformer:
    torch.manual_seed(0)
    return Transformer(SHAPE, context_length=30).double()


@on_ranks(2)
def test_compiled() -> None:
    """It goes into a compiled function."""
    parts = [split(x, 2) for x in inputs(torch.float64, 8)]
    compiled = torch.compile(lambda q, k, v: ring_attention(q, k, v), backend="eager")
    assert furthest(differentiate(compiled, parts), differentiate(ring_attention, parts)) == 0


@on_ranks(2)
@pytest.mark.parametrize("method", METHODS)
def test_garbage(method: str) -> None:
    """Forward and backward leave no objects in cycles, with the tensors that they hold, to the
    garbage collector."""
    parts = [split(x, 2) for x in inputs(torch.float32, 8)]
    differentiate(METHODS[method], parts)
    gc.collect()
    gc.disable()
    differentiate(METHODS[method], parts)
    n_objects = gc.collect()
    gc.enable()
    assert n_objects == 0


@on_ranks(3)
@pytest.mark.parametrize("method", METHODS)
def test_bytes(method: str) -> None:
    """A rank sends forward and backward what the formula says, but for the notes that ranks agree
    by."""
    p = dist.get_world_size()
    parts = [split(x, 2) for x in inputs(torch.bfloat16, 6 * p)]
    with recorded_traffic() as traffic:
        differentiate(METHODS[method], parts)
    sent = sum(call.sent_bytes for call in traffic if call.is_payload)
    block = 2 * parts[1].nbytes
    calls = communication.context_parallel_calls(block, 2 * block, p, is_ring=method == "ring")
    assert sent == communication.sent_bytes(calls, p)


@on_ranks(2)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("n_ignored", [0, 5, 12, 24])
def test_training(layout: Any, method: str, n_ignored: int) -> None:
    """The loss is the mean over all targets that count; a rank without any has zeros, not NaN.

    All targets count but the last, then 18 of 23, then those of rank 0 do not (contiguous), then
    none.
    """
    targets = next_tokens(TOKENS)
    targets[:, :n_ignored] = IGNORED
    model = build()
    expected = masked_mean(model(TOKENS), targets)
    expected.backward()
    cut = context_parallel(build(), attention=METHODS[method], layout=layout)
    wrapper = BucketedDDP(cut)
    tokens, own_targets = (split(x, 1, layout=layout) for x in (TOKENS, targets))
    loss = mean_loss(wrapper(tokens), own_targets)
    loss.backward()
    result = {"loss": loss.detach(), **gradients(wrapper.module)}
    assert furthest(result, {"loss": expected.detach(), **gradients(model)}) <= EXACT


@on_ranks(2)
def test_models_that_are_refused() -> None:
    """What attention across ranks cannot do is refused by name."""

    def by_document(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        return naive_attention(q, k, v, causal)

    def make(attention: Any) -> Transformer:
        return Transformer(SHAPE, context_length=30, attention=attention)

    without = build()
    without.layers[1].attention = torch.nn.Linear(16, 16)
    with_batch_norm = build()
    with_batch_norm.layers[0].feed_forward.down = torch.nn.BatchNorm1d(24)
    attempts: Attempts = [
        ("among zigzag", lambda: context_parallel(build(), layout="zig-zag")),
        ("by_document", lambda: context_parallel(make(by_document))),
        ("layer 0", lambda: context_parallel(make(partial(naive_attention, scale=2.0)))),
        ("layer 1 has Linear", lambda: context_parallel(without)),
        ("BatchNorm1d", lambda: context_parallel(with_batch_norm)),
        ("Sequential", lambda: context_parallel(torch.nn.Sequential())),  # type: ignore[arg-type]
    ]
    for name in attention_implementations.RESERVED:
        context_parallel(make(attention_implementations.IMPLEMENTATIONS[name]))
    copied = copy.deepcopy(context_parallel(context_parallel(build())))
    copied(split(TOKENS, 1))
    assert_refused_everywhere(attempts)


@on_ranks(2)
def test_agreement() -> None:
    """Ranks agree once on a kind of call, and see afterwards if one makes another call."""
    q, k, v, _ = inputs(torch.float32, 8)
    calls = []
    agree = context_attention.agree_per_pass
    with mock.patch.object(context_attention, "agree_per_pass", side_effect=agree) as agreement:
        for _ in range(3):
            for is_causal in (True, False):
                ring_attention(q, k, v, is_causal=is_causal)
            calls.append(agreement.call_count)
    assert calls[0] == calls[-1] <= 2
    group = dist.new_group()  # in which messages are lost
    for layout in LAYOUTS:
        ring_attention(q, k, v, layout=layout, group=group)
    with pytest.raises(RuntimeError, match="another attention call"):
        ring_attention(q, k, v, layout=LAYOUTS[dist.get_rank()], group=group)


@on_ranks(2)
def test_skipped_backward() -> None:
    """A rank that skips a backward pass is found, rather than blocks being taken for others."""
    parts = [split(x, 2).requires_grad_() for x in inputs(torch.float32, 8)[:3]]
    group = dist.new_group()  # in which messages are lost
    output = ring_attention(*parts, group=group)

    def go_on() -> None:
        if dist.get_rank() == 0:
            output.sum().backward()
        ring_attention(*parts, group=group)

    with pytest.raises(RuntimeError, match="rank"):
        go_on()


@on_ranks(3)
def test_refusals() -> None:
    rank = dist.get_rank()
    q, k, v, _ = inputs(torch.float32, 6)
    attempts: Attempts = [
        ("among zigzag, contiguous", lambda: ring_attention(q, k, v, layout="spiral")),
        ("expected the same shapes", lambda: ring_attention(q, k, v, layout=LAYOUTS[rank % 2])),
        ("expected the same shapes", lambda: ring_attention(q, k, v, is_causal=rank == 0)),
        ("6 parts divide", lambda: ring_attention(q[:, :, :5], k[:, :, :5], v[:, :, :5])),
        ("as many keys as queries", lambda: gather_attention(q, k[:, :, :4], v[:, :, :4])),
        # on rank 1, two heads share three
        ("expected", lambda: ring_attention(q[:, : 2 + rank], k, v)),
        (
            "expected the same shapes",
            lambda: ring_attention(q[: 1 + rank % 2], k[: 1 + rank % 2], v[: 1 + rank % 2]),
        ),
        (
            "expected the same shapes",
            lambda: ring_attention(q, k, v.clone().requires_grad_(rank == 1)),
        ),
        ("6 parts divide", lambda: split(q[:, :, :5], 2)),
        ("3 parts divide", lambda: context.local_positions(7, layout="contiguous")),
        ("at most 30", lambda: context_parallel(build())(TOKENS)),
    ]
    assert_refused_everywhere(attempts)
