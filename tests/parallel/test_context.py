"""Attention over a sequence that is cut over ranks computes what one process does, and needs every message."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from labkit.costs import communication
from labkit.costs.transformer import TransformerShape
from labkit.nn.attention import naive_attention
from labkit.nn.transformer import Transformer, language_model_loss
from labkit.parallel import context
from labkit.parallel.agreement import NOTE_BYTES
from labkit.parallel.collectives import all_reduce
from labkit.parallel.context import (
    LAYOUTS,
    context_parallel,
    gather_attention,
    join_sequence,
    local_positions,
    ring_attention,
    split_sequence,
)
from labkit.parallel.data_parallel import BucketedDDP
from labkit.parallel.launch import run_ranks
from labkit.parallel.traffic import recorded_traffic

pytestmark = pytest.mark.usefixtures("workers_travel_by_value")

TOLERANCES = {
    torch.float64: 1e-10,
    torch.float32: 128 * torch.finfo(torch.float32).eps,
    torch.bfloat16: 4 * torch.finfo(torch.bfloat16).eps,
}
METHODS = {"ring": ring_attention, "gather": gather_attention}


def inputs(dtype: torch.dtype, length: int, heads: int = 4, batch: int = 2) -> list[Tensor]:
    """q, k, v and the output's gradient; k and v have two heads."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(batch, number, length, 8) for number in (heads, 2, 2, heads)]
    return [torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def reference(dtype: torch.dtype, length: int, *, is_causal: bool) -> list[Tensor]:
    """Output and gradients of one process, in float64 from the same values."""
    q, k, v, grad = (x.double() for x in inputs(dtype, length))
    for x in (q, k, v):
        x.requires_grad_()
    output = naive_attention(q, k, v, is_causal)
    output.backward(grad)
    return [output.detach(), *(x.grad for x in (q, k, v))]


def attend(method: str, dtype: torch.dtype, length: int, **options: Any) -> list[Tensor]:
    """Output and gradients of the whole sequence, joined."""
    layout = {"layout": options["layout"]}
    q, k, v, grad = (split_sequence(x, 2, **layout) for x in inputs(dtype, length))
    for x in (q, k, v):
        x.requires_grad_()
    output = METHODS[method](q, k, v, **options)
    output.backward(grad)
    assert output.dtype == q.grad.dtype == dtype
    return [join_sequence(x, 2, **layout) for x in (output, q.grad, k.grad, v.grad)]


def furthest(result: list[Tensor], expected: list[Tensor]) -> float:
    pairs = zip(result, expected, strict=True)
    return float(max((a.double() - b).abs().max() / (1 + b.abs().max()) for a, b in pairs))


def check_parity() -> list[str]:
    wrong, p = [], dist.get_world_size()
    for dtype, tolerance in TOLERANCES.items():
        for is_causal in (True, False):
            for layout in LAYOUTS:
                length = 2 * p * 3 if layout == "zigzag" else p * 5
                expected = reference(dtype, length, is_causal=is_causal)
                for method, transport in (("ring", "auto"), ("gather", "auto"), ("ring", "point_to_point")):
                    options = {"is_causal": is_causal, "layout": layout, "transport": transport}
                    error = furthest(attend(method, dtype, length, **options), expected)
                    wrong += [f"{method} {dtype} {options}: {error}"] if not error <= tolerance else []
    return wrong


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_it_computes_what_one_process_does(world_size: int) -> None:
    assert run_ranks(check_parity, world_size=world_size) == [[]] * world_size


def test_positions_cover_the_sequence() -> None:
    assert [context._positions(12, rank, 3, "zigzag").tolist() for rank in range(3)] == [
        [0, 1, 10, 11],
        [2, 3, 8, 9],
        [4, 5, 6, 7],
    ]
    assert context._positions(6, 1, 3, "contiguous").tolist() == [2, 3]


SHAPE = TransformerShape(d_model=16, d_ff=24, n_layers=2, n_heads=4, vocabulary=11)
TOKENS = (torch.arange(24) * 5 % 11).view(1, 24)


def build() -> Transformer:
    torch.manual_seed(0)
    return Transformer(SHAPE, context_length=30).double()


def train_transformer() -> list[float]:
    """Rotary positions are those of the layout, and the mean over ranks is the gradient of the sequence."""
    model = build()
    language_model_loss(model(TOKENS), TOKENS.roll(-1)).backward()
    expected, errors = {name: p.grad for name, p in model.named_parameters()}, []
    for layout in LAYOUTS:
        for method in METHODS.values():
            wrapper = BucketedDDP(context_parallel(build(), attention=method, layout=layout))
            local, targets = (split_sequence(x, 1, layout=layout) for x in (TOKENS, TOKENS.roll(-1)))
            language_model_loss(wrapper(local), targets).backward()
            gradients = {name: p.grad for name, p in wrapper.module.named_parameters()}
            errors.append(furthest(list(gradients.values()), list(expected.values())))
    return errors


def test_a_transformer_trains_on_a_part_of_the_sequence_per_rank() -> None:
    assert max(max(errors) for errors in run_ranks(train_transformer, world_size=2)) <= 1e-10


@contextmanager
def without_message(number: int) -> Iterator[list[int]]:
    """Leave one message out on all ranks: zeros arrive. Yield a list of the numbers of the messages."""
    seen: list[int] = []
    originals = context.exchange, context.all_gather, context.reduce_scatter

    def exchange(sent: Tensor, to: int, received: Tensor, source: int, *rest: Any, **options: Any) -> None:
        seen.append(len(seen))
        if seen[-1] == number:
            received.zero_()
        else:
            originals[0](sent, to, received, source, *rest, **options)

    def all_gather(blocks: Tensor, *rest: Any, **options: Any) -> None:
        seen.append(len(seen))
        if seen[-1] == number:
            blocks[torch.arange(len(blocks)) != dist.get_rank()] = 0
        else:
            originals[1](blocks, *rest, **options)

    def reduce_scatter(whole: Tensor, *rest: Any, into: Tensor, **options: Any) -> None:
        seen.append(len(seen))
        if seen[-1] == number:
            into.copy_(whole[dist.get_rank()].flatten())
        else:
            originals[2](whole, *rest, into=into, **options)

    context.exchange, context.all_gather, context.reduce_scatter = exchange, all_gather, reduce_scatter
    try:
        yield seen
    finally:
        context.exchange, context.all_gather, context.reduce_scatter = originals


def find_needless_messages(method: str, layout: str) -> list[str]:
    needless, number, total = [], 0, 1
    expected = reference(torch.float64, 18, is_causal=True)
    while number < total:
        parts = [split_sequence(x, 2, layout=layout) for x in inputs(torch.float64, 18)]
        for x in parts[:3]:
            x.requires_grad_()
        with without_message(number) as seen:
            output = METHODS[method](*parts[:3], layout=layout)
            output.backward(parts[3])
        result = [join_sequence(x, 2, layout=layout) for x in (output, *(x.grad for x in parts[:3]))]
        if furthest(result, expected) <= 1e-10:
            needless.append(f"message {number}")
        number, total = number + 1, len(seen)
    return [*needless, f"{total} messages"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("method", "total"), [("ring", 6), ("gather", 3)])
def test_every_message_is_needed(method: str, total: int, layout: str) -> None:
    assert run_ranks(find_needless_messages, method, layout, world_size=3) == [[f"{total} messages"]] * 3


def count_bytes(method: str) -> float:
    """Bytes that this rank sends forward and backward, but for the notes it agrees by, and those of the formula."""
    p = dist.get_world_size()
    q, k, v, grad = (split_sequence(x, 2) for x in inputs(torch.bfloat16, 6 * p))
    for x in (q, k, v):
        x.requires_grad_()
    with recorded_traffic() as traffic:
        METHODS[method](q, k, v).backward(grad)
    assert [call.sent_bytes for call in traffic if call.dtype == "int64"] == [NOTE_BYTES * (p - 1)]
    sent = sum(call.sent_bytes for call in traffic if call.dtype != "int64")
    calls = communication.context_parallel_calls(2 * k.nbytes, 4 * k.nbytes, p, is_ring=method == "ring")
    return sent - communication.sent_bytes(calls, p)


@pytest.mark.parametrize("method", METHODS)
def test_it_sends_what_the_formula_says(method: str) -> None:
    assert run_ranks(count_bytes, method, world_size=3) == [0] * 3


def refuse() -> list[str]:
    """Return this rank's errors; a collective after each shows that no message was left behind."""
    rank = dist.get_rank()
    q, k, v, _ = inputs(torch.float32, 6)
    attempts: list[Callable[[], object]] = [
        lambda: ring_attention(q, k, v, layout="spiral"),
        lambda: ring_attention(q, k, v, layout=LAYOUTS[rank % 2]),
        lambda: ring_attention(q, k, v, is_causal=rank == 0),
        lambda: ring_attention(q[:, :, :5], k[:, :, :5], v[:, :, :5]),
        lambda: gather_attention(q, k[:, :, :4], v[:, :, :4]),
        lambda: ring_attention(q[:, : 2 + rank], k, v),
        lambda: ring_attention(q[: 1 + rank % 2], k[: 1 + rank % 2], v[: 1 + rank % 2]),
        lambda: split_sequence(q[:, :, :5], 2),
        lambda: local_positions(7, layout="contiguous"),
        lambda: context_parallel(build())(TOKENS),
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


def test_what_does_not_fit_is_refused_in_one_line_on_all_ranks() -> None:
    same, parts = "expected the same shapes", "6 parts divide"
    expected = ["a layout among zigzag", same, same, parts, "as many keys as queries", "", same, parts]
    expected += ["3 parts divide", "at most 30"]
    texts_by_rank = run_ranks(refuse, world_size=3)
    for texts in texts_by_rank:
        for text, part in zip(texts, expected, strict=True):
            assert part in text
            assert "accepted" not in text
            assert "\n" not in text
    # one rank's heads fit, and it hears from another rank that the other's do not
    assert {texts[5].split("; ")[0][:30] for texts in texts_by_rank} >= {"expected valid shapes and option"[:30]}
