"""Collectives against the exact answer in float64: algorithms, transports, dtypes, lengths,
layouts, numbers of ranks.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from labkit.lab.pages.schedule import record_schedule
from labkit.parallel import transport as transports
from labkit.parallel.collectives import (
    ALGORITHMS,
    ONE_SHOT_BYTES,
    all_gather,
    all_reduce,
    reduce_scatter,
    ring_all_reduce,
)
from labkit.parallel.exchange import exchange, start_exchange
from labkit.parallel.launch import run_ranks
from labkit.parallel.messages import gather_json
from labkit.parallel.prepare import shard_sizes
from labkit.parallel.select_algorithm import select_algorithm
from labkit.parallel.traffic import recorded_traffic
from labkit.parallel.transport import POINT_TO_POINT, SHARED, find_transport, library
from labkit.parallel.transport.point_to_point import BatchTransport, StreamTransport
from tests.nn.against_oracle import poisoned_memory
from tests.parallel.shared_ranks import assert_refused, on_ranks

SHORT = (0, 1, 3, 1000)
LONG = 2**18 + 1
CPU = torch.device("cpu")
TRANSPORTS = (POINT_TO_POINT, SHARED) if library.unavailable_reason() is None else (POINT_TO_POINT,)
# Largest whole number that 8 ranks can add without rounding, over 8.
EXACT_BELOW = {
    torch.float64: 2**49,
    torch.float32: 2**21,
    torch.float16: 2**8,
    torch.bfloat16: 2**5,
}


def phases(
    x: torch.Tensor, group: Any = None, op: str = "mean", *, transport: Any = "auto"
) -> None:
    """An all-reduce by its two phases."""
    reduce_scatter(x, group, op, transport=transport)
    all_gather(x, group, transport=transport)


def phases_into(
    x: torch.Tensor, group: Any = None, op: str = "mean", *, transport: Any = "auto"
) -> None:
    """The same with the shard in a vector of its own."""
    sizes = shard_sizes(x.numel(), dist.get_world_size(group))
    rank = dist.get_rank(group)
    shard = torch.full((sizes[rank],), torch.nan, dtype=x.dtype)
    reduce_scatter(x.detach().clone(), group, op, into=shard, transport=transport)
    whole = torch.full((x.numel(),), torch.nan, dtype=x.dtype)
    whole.split_with_sizes(sizes)[rank].copy_(shard)
    all_gather(whole, group, transport=transport)
    x.detach().copy_(whole.view(x.shape))


ALL = {**ALGORITHMS, "auto": all_reduce, "phases": phases, "phases into": phases_into}
FUNCTIONS = {
    f"{name} {by}": partial(function, transport=by)
    for name, function in ALL.items()
    for by in TRANSPORTS
}

IN_TURN = frozenset({"ring", "butterfly", "one_shot", "auto", "phases"})
BY_DOUBLING = frozenset({"recursive_doubling", "halving_doubling"})
ADDITIONS = dict.fromkeys(IN_TURN, lambda p: p - 1)
ADDITIONS |= dict.fromkeys(BY_DOUBLING, lambda p: math.ceil(math.log2(p)))
"""Additions of p ranks' parts that follow one another, each of which rounds."""


def whole_numbers(rank: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    """Another value at every place and rank as far as the dtype allows, with exact sums over 8
    ranks."""
    places = torch.arange(rank, 8 * length + rank, 8, dtype=torch.int64)
    return places.mul_(7919).bitwise_and_(EXACT_BELOW[dtype] - 1).to(dtype)


def assert_alike(results: dict[str, torch.Tensor], group: Any = None) -> None:
    """The bits of all cases are the same on all ranks."""
    sums = {
        case: int(x.view(torch.uint8).long().mul(torch.arange(x.nbytes)).sum())
        for case, x in results.items()
    }
    by_rank = gather_json(sums, group)
    assert by_rank == [sums] * len(by_rank)


def assert_exact(name: str, length: int, dtype: torch.dtype) -> None:
    """The sum and the mean of whole numbers are exact."""
    results: dict[str, torch.Tensor] = {}
    rank = dist.get_rank()
    p = dist.get_world_size()
    inputs = [whole_numbers(r, length, dtype) for r in range(p)]
    total = sum((x.double() for x in inputs), torch.zeros(length, dtype=torch.float64))
    for op, exact in (("sum", total), ("mean", total / p)):
        x = inputs[rank].clone()
        with poisoned_memory():
            FUNCTIONS[name](x, op=op)
        # float16 divides first: exact for a power of two, else one more rounding and D of the sum
        if dtype == torch.float16 and op == "mean" and p & (p - 1):
            assert ((x.double() - exact).abs() <= p * 2.0**-11 * exact).all(), (length, dtype)
            results[op] = x
        else:
            bits = exact.to(dtype).view(torch.uint8)
            assert torch.equal(x.view(torch.uint8), bits), (op, length, dtype)
    assert_alike(results)


@on_ranks(2, 3, slow=(1, 4, 5, 8))
@pytest.mark.parametrize("name", FUNCTIONS)
def test_exact(name: str) -> None:
    for length, dtype in product(SHORT, EXACT_BELOW):
        assert_exact(name, length, dtype)


@on_ranks(3, slow=(8,))
@pytest.mark.parametrize("name", FUNCTIONS)
def test_exact_in_pieces(name: str) -> None:
    """Long tensors travel in chunks: no round sends what the one before has yet to write."""
    assert_exact(name, LONG, torch.float64)
    assert_exact(name, LONG, torch.bfloat16)


@on_ranks(3, slow=(2, 5, 8))
@pytest.mark.parametrize("name", ALL)
def test_bound(name: str) -> None:
    """Rounded means are within the stated bound, and the same to the bit over every transport."""
    p = dist.get_world_size()
    additions = ADDITIONS[name.split()[0]](p)
    for length, dtype in product((3, 1000, 100_001), EXACT_BELOW):
        numbers = [
            torch.randn(length, generator=torch.Generator().manual_seed(r)) for r in range(p)
        ]
        inputs = [(x * 10.0 ** x.clamp(-3, 3)).to(dtype) for x in numbers]
        exact = torch.stack([x.double() for x in inputs]).mean(0)
        magnitude = torch.stack([x.double().abs() for x in inputs]).mean(0)
        # The bound is of first order: 1% for the rest; and the reference itself rounds in float64.
        unit = torch.finfo(dtype).eps / 2
        bound = 1.01 * (additions + 1) * unit * magnitude + p * 2.0**-53 * magnitude
        bound += p * 2.0**-25 * (dtype == torch.float16)
        results = {}
        for by in TRANSPORTS:
            x = inputs[dist.get_rank()].clone()
            with poisoned_memory():
                ALL[name](x, transport=by)
            assert ((x.double() - exact).abs() <= bound).all(), (by, length, dtype)
            results[by] = x
        if name in ALGORITHMS:
            assert torch.equal(results[TRANSPORTS[0]], results[TRANSPORTS[-1]]), (length, dtype)
        assert_alike(results)


@on_ranks(3)
def test_special() -> None:
    """Infinite, tiny and large numbers add as torch adds them."""
    for dtype in EXACT_BELOW:
        tiny = torch.finfo(dtype).tiny
        large = torch.finfo(dtype).max
        values = torch.tensor(
            [torch.inf, -torch.inf, torch.nan, tiny / 4, large, -0.0, 0.0], dtype=dtype
        )
        x = values.roll(dist.get_rank()).repeat(100)
        for name in ALGORITHMS:
            first = x.clone()
            second = x.clone()
            ALGORITHMS[name](first, op="sum", transport=TRANSPORTS[-1])
            ALGORITHMS[name](second, op="sum", transport=POINT_TO_POINT)
            torch.testing.assert_close(first, second, rtol=0, atol=0, equal_nan=True)
        x = torch.full((5,), 60000.0, dtype=torch.float16)
        for name, function in FUNCTIONS.items():
            y = x.clone()
            function(y)
            assert torch.allclose(y, x, rtol=1e-3), f"{name}: float16 overflows on the way"


@on_ranks(3, slow=(2, 4, 5))
def test_bytes() -> None:
    """Bytes sent are those of the schedule, whose costs are tested beside it, to the byte."""
    p = dist.get_world_size()
    length = 60_000
    n_bytes = 4 * length
    calls: dict[str, Callable[..., None]] = {
        **ALGORITHMS,
        "reduce_scatter": reduce_scatter,
        "all_gather": all_gather,
    }
    expected = dict.fromkeys(("reduce_scatter", "all_gather"), n_bytes * (p - 1) / p)
    for name, algorithm in ALGORITHMS.items():
        schedule = record_schedule(algorithm, p)
        sent = Counter[int]()
        for message in schedule.messages:
            sent[message.source] += message.stop - message.start
        expected[name] = max(sent.values()) * n_bytes / schedule.elements
    for by in TRANSPORTS:
        for name, call in calls.items():
            with recorded_traffic() as traffic:
                call(torch.ones(length), transport=by)
            (record,) = traffic
            assert (record.n_bytes, record.dtype) == (n_bytes, "float32"), (name, by)
            assert max(gather_json(record.sent_bytes)) == expected[name], (name, by)


@on_ranks(3)
def test_exchange() -> None:
    """Tensors are exchanged between pairs, and around a ring, also two at a time with another
    collective under way."""
    rank = dist.get_rank()
    p = dist.get_world_size()
    for by in TRANSPORTS:
        find_transport(None, CPU, by)  # by all ranks, before two of them use it
        for length in (1, 1000, 700_001):
            sent = torch.arange(length, dtype=torch.int64).view(1, -1) + rank
            received = torch.zeros(length, dtype=torch.int64)
            exchange(sent, (rank + 1) % p, received, (rank - 1) % p, transport=by)
            assert torch.equal(received, torch.arange(length) + (rank - 1) % p), (by, length)
            both = torch.zeros(2, length, dtype=torch.int64)
            total = torch.ones(length)
            starts = [
                start_exchange(sent + i, (rank + 1) % p, both[i], (rank - 1) % p, transport=by)
                for i in (0, 1)
            ]
            all_reduce(total, op="sum", transport=by)
            for complete in reversed(starts):
                complete()
            assert torch.equal(both, received + torch.arange(2).view(2, 1)), (by, length)
            assert total.eq(p).all()
            back = torch.zeros(length + 1, 2)[:-1, 0]
            if rank == 0:
                exchange(torch.arange(float(length)), 2, None, transport=by)
            if rank == 2:
                exchange(None, None, back, 0, transport=by)
                assert torch.equal(back, torch.arange(float(length))), (by, length)
    x = torch.ones(3)
    assert_refused("got 3", partial(exchange, x, 3, None, None))
    assert_refused("got None", partial(exchange, x, None, None, None))
    assert_refused("a tensor to send", partial(exchange, None, None, None, None))


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "scalar": lambda x: x[7],
    "nothing": lambda x: x[7:7:2],
    "one element with a stride": lambda x: x[5:7:2],
    "transposed": lambda x: x.view(24, 10).t(),
    "strided": lambda x: x[1::3],
    "offset": lambda x: x[5:],
    "channels last": lambda x: x.view(2, 3, 8, 5).permute(0, 3, 1, 2),
    "stride 0 where the size is 1": lambda x: x.as_strided((3, 1), (2, 0)),
    "negated when it is read": torch._neg_view,
}


@on_ranks(3, slow=(1,))
@pytest.mark.parametrize("name", FUNCTIONS)
def test_layouts(name: str) -> None:
    """Any layout is reduced in place, and autograd sees nothing."""
    rank = dist.get_rank()
    p = dist.get_world_size()
    base = torch.arange(240.0) + 1000 * rank
    mean = torch.arange(240.0) + 1000 * (p - 1) / 2
    for layout, view in VIEWS.items():
        x = base.clone()
        expected = base.clone()
        FUNCTIONS[name](view(x))
        view(expected).copy_(view(mean))
        assert torch.equal(x, expected), layout
    parameter = torch.nn.Parameter(base.clone())
    parameter.grad = torch.full((240,), 2.0 + rank)
    FUNCTIONS[name](parameter)
    FUNCTIONS[name](parameter.grad)
    assert torch.equal(parameter, mean)
    assert parameter.is_leaf
    assert parameter.requires_grad
    assert torch.equal(parameter.grad, torch.full((240,), 2 + (p - 1) / 2))


@on_ranks(3, slow=(1,))
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float8_e4m3fn])
def test_bytes_are_gathered_whatever_their_dtype(dtype: torch.dtype) -> None:
    rank = dist.get_rank()
    p = dist.get_world_size()
    whole = (torch.arange(4 * p + 1) % 2).to(dtype)
    x = torch.zeros_like(whole)
    sizes = shard_sizes(len(whole), p)
    x.split_with_sizes(sizes)[rank].copy_(whole.split_with_sizes(sizes)[rank])
    all_gather(x)
    assert torch.equal(x.view(torch.uint8), whole.view(torch.uint8))


@on_ranks(2)
def test_kept_for_backward() -> None:
    """A tensor kept for backward and changed by a collective is an error there."""
    for by in TRANSPORTS:
        for call in (
            partial(all_reduce, transport=by),
            partial(reduce_scatter, transport=by),
            lambda kept, by=by: reduce_scatter(torch.ones(20), into=kept, transport=by),
            partial(all_gather, transport=by),
        ):
            weight = torch.ones(10, requires_grad=True)
            kept = torch.ones(10)
            product = weight * kept
            call(kept)
            with pytest.raises(RuntimeError, match="modified"):
                product.sum().backward()


@on_ranks(3)
@pytest.mark.parametrize("name", [name for name in FUNCTIONS if "into" not in name])
def test_inference_mode(name: str) -> None:
    """Tensors of inference mode are refused outside of it; scratch memory is shared."""
    group = dist.new_group()  # whose first call makes the scratch memory
    with torch.inference_mode():
        x = torch.ones(10)
        FUNCTIONS[name](x, group, op="sum")
    assert_refused("inference", partial(FUNCTIONS[name], x, group))
    y = torch.ones(10, requires_grad=True)
    FUNCTIONS[name](y, group, op="sum")
    assert torch.equal(y, torch.full((10,), 3.0))
    assert torch.equal(x, torch.full((10,), 3.0))


@on_ranks(4)
def test_sequence() -> None:
    """Calls follow each other without a barrier, whatever their sizes."""
    rank = dist.get_rank()
    p = dist.get_world_size()
    other = torch.zeros(3)
    # a caller's message must not be taken for one of the collective's
    pending = dist.irecv(other, (rank - 1) % p)
    lengths = (1000, 3, 70_000, 1, 600_001, 17, 0, 300_000, 5)
    for number in range(60):
        length = lengths[number % len(lengths)]
        name = list(FUNCTIONS)[number % len(FUNCTIONS)]
        if number % 7 == rank:
            time.sleep(0.002)
        x = torch.arange(float(length)) + number + rank
        FUNCTIONS[name](x, op="sum")
        expected = p * (torch.arange(float(length)) + number) + p * (p - 1) / 2
        assert torch.equal(x, expected), (number, name, length)
    dist.send(torch.full((3,), float(rank)), (rank + 1) % p)
    pending.wait()
    assert other.tolist() == [float((rank - 1) % p)] * 3


@on_ranks(4, slow=(5,))
def test_groups() -> None:
    """Groups work side by side, and count ranks their own way."""
    results: dict[str, torch.Tensor] = {}
    rank = dist.get_rank()
    layout = [[3, 0], [1, 2, *range(4, dist.get_world_size())]]
    groups = [dist.new_group(ranks) for ranks in layout]
    mine = next(i for i, ranks in enumerate(layout) if rank in ranks)
    members = layout[mine]
    for name, function in FUNCTIONS.items():
        for length in (1, 1000, 300_001):
            x = torch.arange(float(length)) + rank
            function(x, groups[mine], op="sum")
            expected = len(members) * torch.arange(float(length)) + sum(members)
            assert torch.equal(x, expected), (name, length)
            results[f"{name} {length}"] = x
        x = torch.full((100,), float(rank))
        function(x)  # all ranks, between the groups' calls
        assert torch.allclose(x, torch.full((100,), (dist.get_world_size() - 1) / 2)), name
    assert_alike(results, groups[mine])


@on_ranks(4, slow=(2,))
@pytest.mark.parametrize("name", ALGORITHMS)
def test_scratch_is_bounded_and_kept(name: str) -> None:
    transport = StreamTransport(dist.group.WORLD)  # type: ignore[arg-type]
    for length in (1000, 1_000_000, 1_000_000):
        ALGORITHMS[name](torch.ones(length), transport=transport)
        assert len(transport._scratch) <= StreamTransport.scratch_limit_bytes + 4096


@on_ranks(4, slow=(2,))
def test_scratch_goes_with_its_group() -> None:
    group = dist.new_group(range(dist.get_world_size()))
    ring_all_reduce(torch.ones(1000), group)
    before = len(transports._selections)
    dist.destroy_process_group(group)
    del group
    assert len(transports._selections) == before - 1


@on_ranks(3, slow=(1, 2, 4, 5))
@pytest.mark.parametrize("name", ALGORITHMS)
def test_batches(name: str) -> None:
    """Every algorithm runs in batches, and the butterfly with all messages of a phase at once:
    what NCCL needs."""
    rank = dist.get_rank()
    p = dist.get_world_size()
    batches = BatchTransport(dist.group.WORLD, CPU, has_collectives=False)  # type: ignore[arg-type]
    batches.scratch_limit_bytes = 4 * 4096
    for length in (0, 1, 3, 1000, 30_001):
        x = torch.arange(float(length)) + rank
        with mock.patch.object(batches, "_launch", wraps=batches._launch) as launch:
            ALGORITHMS[name](x, op="sum", transport=batches)
        assert torch.equal(x, p * torch.arange(float(length)) + p * (p - 1) / 2), length
        launched = {len(call.args[0]) for call in launch.call_args_list}
        if name == "butterfly" and p > 1:
            assert {p - 1} <= launched <= {p - 1, 2 * (p - 1)}, length
    limit = ONE_SHOT_BYTES if name == "one_shot" else batches.scratch_limit_bytes
    assert len(batches._scratch) <= limit + 4096


@on_ranks(2)
def test_refusals() -> None:
    """What cannot be reduced is refused with what was expected, before it is changed."""
    half = torch.ones(6, dtype=torch.float16)
    outside = dist.GroupMember.NON_GROUP_MEMBER
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("into", lambda: reduce_scatter(half, into=torch.empty(6, dtype=torch.float16))),
        ("into", lambda: reduce_scatter(half, into=torch.empty(3))),
        ("share memory", lambda: reduce_scatter(half, into=half[:3])),
        ("dense", lambda: all_gather(half.to_sparse())),
        ("share memory", lambda: all_gather(half[:1].expand(6))),
        ("this rank belongs to", lambda: all_gather(half, outside)),
        ("auto, point_to_point, shared", lambda: all_gather(half, transport="pigeon")),
    ]
    for function in (*ALGORITHMS.values(), all_reduce, reduce_scatter):
        calls += [
            ('"mean" or "sum"', partial(function, half, op="max")),
            (
                "float64, float32, float16, bfloat16",
                partial(function, torch.ones(3, dtype=torch.int64)),
            ),
            (
                "float64, float32, float16, bfloat16",
                partial(function, torch.ones(3, dtype=torch.complex64)),
            ),
            ("dense", partial(function, torch.ones(3).to_sparse())),
            ("share memory", partial(function, torch.ones(1).expand(3))),
            ("this rank belongs to", partial(function, torch.ones(3), outside)),
        ]
    for expected, call in calls:
        assert_refused(expected, call)
    assert half.tolist() == [1.0] * 6, "changed before it was refused"
    for by in TRANSPORTS:  # nor has it left a message
        x = torch.full((1,), 1.0 + dist.get_rank())
        all_reduce(x, op="sum", transport=by)
        assert x.tolist() == [3.0]


def test_without_a_process_group_the_error_names_what_is_missing() -> None:
    with pytest.raises(ValueError, match="init_process_group"):
        all_reduce(torch.ones(3))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6, 8, 16, 32])
@pytest.mark.parametrize("by", TRANSPORTS)
def test_there_is_an_algorithm_for_every_size(world_size: int, by: str) -> None:
    names = [select_algorithm(1 << exponent, world_size, by) for exponent in range(31)]
    assert set(names) <= set(ALGORITHMS)
    assert names[0] in ("one_shot", "recursive_doubling")  # few messages for the short
    assert names[-1] in ("butterfly", "ring")  # few bytes for the long


# GPUs


@pytest.mark.gpu
def test_gloo_moves_cuda_tensors_through_the_host() -> None:
    run_ranks(_check_cuda, world_size=2)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU per rank")
def test_nccl_moves_cuda_tensors_in_place() -> None:
    run_ranks(_check_cuda, world_size=torch.cuda.device_count(), backend="nccl")


def _check_cuda() -> None:
    rank = dist.get_rank()
    p = dist.get_world_size()
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    for name, function in {**ALGORITHMS, "auto": all_reduce, "phases": phases}.items():
        for length in (*SHORT, 4 * LONG):
            x = torch.arange(length, dtype=torch.float64, device=device) + rank
            function(x, op="sum")
            exact = p * torch.arange(length, dtype=torch.float64, device=device) + p * (p - 1) / 2
            assert torch.equal(x, exact), (name, length)
