"""Collectives against the exact answer in float64: algorithms, transports, dtypes, lengths,
layouts, numbers of ranks.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

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
from tests.parallel.shared_ranks import find_accepted, on_ranks

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


def differing_between_ranks(results: dict[str, torch.Tensor], group: Any = None) -> list[str]:
    """The cases in which some rank's bits are not those of another."""
    sums = {
        case: int(x.view(torch.uint8).long().mul(torch.arange(x.nbytes)).sum())
        for case, x in results.items()
    }
    by_rank = gather_json(sums, group)
    return [
        f"{case}: differs between ranks" for case in sums if len({of[case] for of in by_rank}) > 1
    ]


def find_inexact(lengths: Iterable[int], dtypes: Iterable[torch.dtype] = EXACT_BELOW) -> list[str]:
    """Return the cases in which the sum or mean of whole numbers is not exact."""
    wrong = []
    results: dict[str, torch.Tensor] = {}
    rank = dist.get_rank()
    p = dist.get_world_size()
    for length in lengths:
        for dtype in dtypes:
            inputs = [whole_numbers(r, length, dtype) for r in range(p)]
            total = sum((x.double() for x in inputs), torch.zeros(length, dtype=torch.float64))
            for op, exact in (("sum", total), ("mean", total / p)):
                # float16 divides first: exact for a power of two, else one more rounding and D of
                # the sum
                is_rounded = dtype == torch.float16 and op == "mean" and p & (p - 1)
                error = p * 2.0**-11 * exact if is_rounded else None
                for name, function in FUNCTIONS.items():
                    x = inputs[rank].clone()
                    with poisoned_memory():
                        function(x, op=op)
                    case = f"{name} {op} {length} {dtype}"
                    if error is None and not torch.equal(
                        x.view(torch.uint8), exact.to(dtype).view(torch.uint8)
                    ):
                        wrong.append(f"rank {rank}: {case}: not exact")
                    if error is not None:
                        results[case] = x
                        if not ((x.double() - exact).abs() <= error).all():
                            wrong.append(f"rank {rank}: {case}: beyond the bound")
    return wrong + differing_between_ranks(results)


@on_ranks(2, 3, slow=(1, 4, 5, 8))
def test_exact() -> list[str]:
    return find_inexact(SHORT)


@on_ranks(3, slow=(8,))
def test_exact_in_pieces() -> list[str]:
    return find_inexact((LONG,), (torch.float64, torch.bfloat16))


@on_ranks(3, slow=(2, 5, 8))
def test_bound() -> list[str]:
    """Rounded means are within the stated bound, and the same to the bit over every transport."""
    wrong = []
    results: dict[str, torch.Tensor] = {}
    rank = dist.get_rank()
    p = dist.get_world_size()
    for length in (3, 1000, 100_001):
        for dtype in EXACT_BELOW:
            numbers = [
                torch.randn(length, generator=torch.Generator().manual_seed(r)) for r in range(p)
            ]
            inputs = [(x * 10.0 ** x.clamp(-3, 3)).to(dtype) for x in numbers]
            exact = torch.stack([x.double() for x in inputs]).mean(0)
            magnitude = torch.stack([x.double().abs() for x in inputs]).mean(0)
            unit = torch.finfo(dtype).eps / 2
            for name, function in FUNCTIONS.items():
                x = inputs[rank].clone()
                with poisoned_memory():
                    function(x)
                additions = ADDITIONS[name.split()[0]](p)
                # The bound is of first order: 1% for the rest; and the reference itself rounds in
                # float64.
                bound = 1.01 * (additions + 1) * unit * magnitude + p * 2.0**-53 * magnitude
                bound += p * 2.0**-25 * (dtype == torch.float16)
                if not ((x.double() - exact).abs() <= bound).all():
                    wrong.append(f"rank {rank}: {name} {length} {dtype}")
                results[f"{name} {length} {dtype}"] = x
            for name in ALGORITHMS:
                first, second = (
                    results[f"{name} {by} {length} {dtype}"]
                    for by in (TRANSPORTS[0], TRANSPORTS[-1])
                )
                if not torch.equal(first, second):
                    wrong.append(
                        f"rank {rank}: {name} {length} {dtype}: other bits by another transport"
                    )
    return wrong + differing_between_ranks(results)


@on_ranks(3)
def test_special() -> list[str]:
    """Infinite, tiny and large numbers add as torch adds them."""
    wrong = []
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
            if not torch.allclose(first, second, 0, 0, equal_nan=True):
                wrong.append(f"{name} {dtype}")
        x = torch.full((5,), 60000.0, dtype=torch.float16)
        for name, function in FUNCTIONS.items():
            y = x.clone()
            function(y)
            if not torch.allclose(y, x, rtol=1e-3):
                wrong.append(f"{name}: float16 overflows on the way")
    return wrong


@on_ranks(3, slow=(2, 4, 5))
def test_bytes() -> list[str]:
    """Bytes sent are those of the schedule, whose costs are tested beside it, to the byte."""
    wrong = []
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
            most = max(gather_json(record.sent_bytes))
            if (record.n_bytes, record.dtype) != (n_bytes, "float32"):
                wrong.append(f"{name} {by}: {record}")
            if most != expected[name]:
                wrong.append(f"{name} {by}: {most} bytes, expected {expected[name]}")
    return wrong


@on_ranks(3)
def test_exchange() -> list[str]:
    """Tensors are exchanged between pairs, and around a ring, also two at a time with another
    collective under way."""
    wrong = []
    rank = dist.get_rank()
    p = dist.get_world_size()
    for by in TRANSPORTS:
        find_transport(None, CPU, by)  # by all ranks, before two of them use it
        for length in (1, 1000, 700_001):
            sent = torch.arange(length, dtype=torch.int64).view(1, -1) + rank
            received = torch.zeros(length, dtype=torch.int64)
            exchange(sent, (rank + 1) % p, received, (rank - 1) % p, transport=by)
            if not torch.equal(received, torch.arange(length) + (rank - 1) % p):
                wrong.append(f"rank {rank}: ring {by} {length}")
            both = torch.zeros(2, length, dtype=torch.int64)
            total = torch.ones(length)
            starts = [
                start_exchange(sent + i, (rank + 1) % p, both[i], (rank - 1) % p, transport=by)
                for i in (0, 1)
            ]
            all_reduce(total, op="sum", transport=by)
            for complete in reversed(starts):
                complete()
            if not (torch.equal(both, received + torch.arange(2).view(2, 1)) and total.eq(p).all()):
                wrong.append(f"rank {rank}: two at a time {by} {length}")
            back = torch.zeros(length + 1, 2)[:-1, 0]
            if rank == 0:
                exchange(torch.arange(float(length)), 2, None, transport=by)
            if rank == 2:
                exchange(None, None, back, 0, transport=by)
                if not torch.equal(back, torch.arange(float(length))):
                    wrong.append(f"pair {by} {length}")
    x = torch.ones(3)
    calls = [
        ("got 3", partial(exchange, x, 3, None, None)),
        ("got None", partial(exchange, x, None, None, None)),
        ("a tensor to send", partial(exchange, None, None, None, None)),
    ]
    return wrong + find_accepted(calls)


@on_ranks(3, slow=(1,))
def test_layouts() -> list[str]:
    """Any layout is reduced in place, and autograd sees nothing."""
    wrong = []
    rank = dist.get_rank()
    p = dist.get_world_size()
    base = torch.arange(240.0) + 1000 * rank
    mean = torch.arange(240.0) + 1000 * (p - 1) / 2
    views: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
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
    for name, function in FUNCTIONS.items():
        for layout, view in views.items():
            x = base.clone()
            expected = base.clone()
            function(view(x))
            view(expected).copy_(view(mean))
            if not torch.equal(x, expected):
                wrong.append(f"{name} {layout}")
        parameter = torch.nn.Parameter(base.clone())
        parameter.grad = torch.full((240,), 2.0 + rank)
        function(parameter)
        function(parameter.grad)
        if (
            not torch.equal(parameter, mean)
            or parameter.grad_fn is not None
            or not parameter.requires_grad
        ):
            wrong.append(f"{name} parameter")
        if not torch.equal(parameter.grad, torch.full((240,), 2 + (p - 1) / 2)):
            wrong.append(f"{name} gradient")
    # bytes are moved, and none is changed
    for dtype in (torch.int64, torch.bool, torch.float8_e4m3fn):
        whole = (torch.arange(4 * p + 1) % 2).to(dtype)
        x = torch.zeros_like(whole)
        sizes = shard_sizes(len(whole), p)
        x.split_with_sizes(sizes)[rank].copy_(whole.split_with_sizes(sizes)[rank])
        all_gather(x)
        if x.view(torch.uint8).tolist() != whole.view(torch.uint8).tolist():
            wrong.append(f"all-gather of {dtype}")
    return wrong


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
def test_inference_mode() -> list[str]:
    """Tensors of inference mode are refused outside of it; scratch memory is shared."""
    wrong = []
    group = dist.new_group()  # whose first call makes the scratch memory
    for name, function in FUNCTIONS.items():
        if "into" in name:
            continue  # it reduces a clone
        with torch.inference_mode():
            x = torch.ones(10)
            function(x, group, op="sum")
        wrong += find_accepted([("inference", partial(function, x, group))])
        y = torch.ones(10, requires_grad=True)
        function(y, group, op="sum")
        if not torch.equal(y, torch.full((10,), 3.0)) or not torch.equal(x, torch.full((10,), 3.0)):
            wrong.append(f"{name}: wrong")
    return wrong


@on_ranks(4)
def test_sequence() -> list[str]:
    """Calls follow each other without a barrier, whatever their sizes."""
    wrong = []
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
        if not torch.equal(x, p * (torch.arange(float(length)) + number) + p * (p - 1) / 2):
            wrong.append(f"rank {rank}: call {number}, {name} {length}")
    dist.send(torch.full((3,), float(rank)), (rank + 1) % p)
    pending.wait()
    return (
        wrong
        if other.tolist() == [float((rank - 1) % p)] * 3
        else [*wrong, f"rank {rank}: the caller's message"]
    )


@on_ranks(4, slow=(5,))
def test_groups() -> list[str]:
    """Groups work side by side, and count ranks their own way."""
    wrong = []
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
            if not torch.equal(x, len(members) * torch.arange(float(length)) + sum(members)):
                wrong.append(f"rank {rank}: {name} {length}")
            results[f"{name} {length}"] = x
        x = torch.full((100,), float(rank))
        function(x)  # all ranks, between the groups' calls
        if not torch.allclose(x, torch.full((100,), (dist.get_world_size() - 1) / 2)):
            wrong.append(f"rank {rank}: {name} over all")
    return wrong + differing_between_ranks(results, groups[mine])


@on_ranks(4, slow=(2,))
def test_scratch() -> list[str]:
    """Scratch memory is bounded and kept, and goes with its group."""
    wrong = []
    for name, algorithm in ALGORITHMS.items():
        transport = StreamTransport(dist.group.WORLD)  # type: ignore[arg-type]
        for length in (1000, 1_000_000, 1_000_000):
            algorithm(torch.ones(length), transport=transport)
            if len(transport._scratch) > StreamTransport.scratch_limit_bytes + 4096:
                wrong.append(f"{name} {length}: {len(transport._scratch)} bytes")
    group = dist.new_group(range(dist.get_world_size()))
    ring_all_reduce(torch.ones(1000), group)
    before = len(transports._selections)
    dist.destroy_process_group(group)
    del group
    return wrong if len(transports._selections) == before - 1 else [*wrong, "goes with its group"]


@on_ranks(3, slow=(1, 2, 4, 5))
def test_batches() -> list[str]:
    """Every algorithm runs in batches, and the butterfly with all messages of a phase at once:
    what NCCL needs."""
    wrong: list[str] = []
    rank = dist.get_rank()
    p = dist.get_world_size()
    for name, function in ALGORITHMS.items():
        batches = BatchTransport(dist.group.WORLD, CPU, has_collectives=False)  # type: ignore[arg-type]
        batches.scratch_limit_bytes = 4 * 4096
        launched: list[int] = []
        launch = batches._launch
        batches._launch = lambda transfers, landings, launch=launch, launched=launched: (
            launched.append(len(transfers)),
            launch(transfers, landings),
        )[1]  # type: ignore
        for length in (0, 1, 3, 1000, 30_001):
            launched.clear()
            x = torch.arange(float(length)) + rank
            function(x, op="sum", transport=batches)
            if not torch.equal(x, p * torch.arange(float(length)) + p * (p - 1) / 2):
                wrong.append(f"rank {rank}: {name} {length}")
            if name == "butterfly" and p > 1 and not {p - 1} <= {*launched} <= {p - 1, 2 * (p - 1)}:
                wrong.append(f"{length}: batches of {launched}")
        limit = ONE_SHOT_BYTES if name == "one_shot" else batches.scratch_limit_bytes
        if len(batches._scratch) > limit + 4096:
            wrong.append(f"{name}: scratch of {len(batches._scratch)} bytes")
    return wrong


@on_ranks(2)
def test_refusals() -> list[str]:
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
    wrong = find_accepted(calls)
    return wrong + ([] if half.tolist() == [1.0] * 6 else ["changed before it was refused"])


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
    assert run_ranks(_check_cuda, world_size=2) == [[], []]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU per rank")
def test_nccl_moves_cuda_tensors_in_place() -> None:
    p = torch.cuda.device_count()
    assert run_ranks(_check_cuda, world_size=p, backend="nccl") == [[]] * p


def _check_cuda() -> list[str]:
    wrong = []
    rank = dist.get_rank()
    p = dist.get_world_size()
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    for name, function in {**ALGORITHMS, "auto": all_reduce, "phases": phases}.items():
        for length in (*SHORT, 4 * LONG):
            x = torch.arange(length, dtype=torch.float64, device=device) + rank
            function(x, op="sum")
            exact = p * torch.arange(length, dtype=torch.float64, device=device) + p * (p - 1) / 2
            if not torch.equal(x, exact):
                wrong.append(f"rank {rank}: {name} {length}")
    return wrong
