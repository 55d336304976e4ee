"""All-reduce against the exact answer, over every algorithm, type, length and number of ranks the design names.

Ranks are started once a test and go through many cases; they return what was wrong, in words.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from labkit.parallel import reduction
from labkit.parallel.chooser import choose_algorithm
from labkit.parallel.collectives import (
    ALGORITHMS,
    all_gather,
    all_reduce,
    reduce_scatter,
    release_scratch,
    ring_all_reduce,
    scratch_bytes,
)
from labkit.parallel.launch import run_ranks
from labkit.parallel.transport import POINT_TO_POINT, SHARED, TRANSPORTS, choice, find_transport
from labkit.parallel.transport.process_group import BatchTransport, StreamTransport
from tests.cases import thinned
from tests.parallel.versions import DEFAULT, MIXED, PYTHON, shared_transport

pytestmark = pytest.mark.usefixtures("workers_travel_by_value")

SHORT = (0, 1, 3, 1000)
LENGTHS = (*SHORT, 2**20 + 1)
ALL = {**ALGORITHMS, "chooser": all_reduce}
FUNCTIONS = {
    f"{name} {transport}": partial(function, transport=transport)
    for name, function in ALL.items()
    for transport in TRANSPORTS
}
# Largest whole number that 8 ranks can add without rounding, over 8.
EXACT_BELOW = {torch.float64: 2**49, torch.float32: 2**21, torch.float16: 2**8, torch.bfloat16: 2**5}
TYPES = tuple(EXACT_BELOW)


def check_on_ranks(check: Callable[..., list[str]], *args: Any, world_size: int) -> None:
    wrong = run_ranks(_poisoned, check, args, world_size=world_size)
    assert [text for of_rank in wrong for text in of_rank] == []


def _poisoned(check: Callable[..., list[str]], args: tuple[Any, ...]) -> list[str]:
    """Runs a check with uninitialized memory full of NaN."""
    # As `use_deterministic_algorithms(True)`, which tells the compiler, too: a second of imports in every rank.
    torch.set_deterministic_debug_mode("error")
    assert torch.empty(1).isnan()
    return check(*args)


def whole_numbers(rank: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    """Another value at every place and rank as far as the type allows, with exact sums over 8 ranks."""
    places = torch.arange(rank, 8 * length + rank, 8, dtype=torch.int64)
    return (places.mul_(7919).bitwise_and_(EXACT_BELOW[dtype] - 1)).to(dtype)  # the remainder of a power of two


def normal_numbers(rank: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(rank), dtype=torch.float64).to(dtype)


def checksum(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.view(torch.uint8).numpy().tobytes())


def differing_between_ranks(checksums: dict[str, int], group: dist.ProcessGroup | None = None) -> list[str]:
    """The cases in which some rank's bytes are not those of another."""
    of_all: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(of_all, checksums, group=group)
    return [f"{case}: differs between ranks" for case in checksums if len({of[case] for of in of_all}) > 1]


# Values


# The long vectors of many ranks take most of the time: on three ranks, which no algorithm treats alike, all are quick.
@pytest.mark.parametrize(
    ("version", "world_size", "lengths"),
    [
        *((DEFAULT, p, LENGTHS) for p in (1, 2, 3)),
        *((DEFAULT, p, SHORT) for p in (4, 5, 8)),
        (PYTHON, 3, SHORT),
        (MIXED, 4, SHORT),
        *(pytest.param(DEFAULT, p, LENGTHS[-1:], marks=pytest.mark.slow) for p in (4, 5, 8)),
        *(pytest.param(version, p, LENGTHS, marks=pytest.mark.slow) for version in (PYTHON, MIXED) for p in (2, 3, 5)),
    ],
    ids=lambda value: f"to {value[-1]}" if isinstance(value, tuple) else str(value),
)
def test_sum_and_mean_of_whole_numbers_are_exact(version: str, world_size: int, lengths: tuple[int, ...]) -> None:
    check_on_ranks(_check_exact, version, lengths, world_size=world_size)


def _check_exact(version: str, lengths: tuple[int, ...]) -> list[str]:
    shared_transport(version)
    wrong = []
    checksums: dict[str, int] = {}
    rank, p = dist.get_rank(), dist.get_world_size()
    for length in lengths:
        for dtype in TYPES:
            inputs = [whole_numbers(r, length, dtype) for r in range(p)]
            total = torch.zeros(length, dtype=torch.float64)
            for x in inputs:
                total += x
            for op, exact in (("sum", total), ("mean", total / p)):
                # float16 divides first: exact for a power of two, else one more rounding and D of the sum
                error = p * 2.0**-11 * exact if dtype == torch.float16 and op == "mean" and p & (p - 1) else None
                rounded = exact.to(dtype)
                for name, function in FUNCTIONS.items():
                    x = inputs[rank].clone()
                    function(x, op=op)
                    case = f"{name} {op} {length} {dtype}"
                    if error is None and not torch.equal(x.view(torch.uint8), rounded.view(torch.uint8)):
                        wrong.append(f"rank {rank}: {case}: not exact")  # the same bits on all ranks, if it is
                    if error is not None:
                        checksums[case] = checksum(x)
                        if not ((x.double() - exact).abs() <= error).all():
                            wrong.append(f"rank {rank}: {case}: beyond the bound")
    return wrong + differing_between_ranks(checksums)


@pytest.mark.parametrize("world_size", thinned([2, 3, 5, 8], lambda world_size: world_size in (3, 5)))
def test_the_mean_of_normal_numbers_stays_within_the_stated_bound(world_size: int) -> None:
    check_on_ranks(_check_bound, world_size=world_size)


def _check_bound() -> list[str]:
    wrong = []
    checksums: dict[str, int] = {}
    rank, p = dist.get_rank(), dist.get_world_size()
    for length in (3, 1000, 100_001):
        drawn = [normal_numbers(r, length, torch.float64) for r in range(p)]
        for dtype in TYPES:
            inputs = [x.to(dtype) for x in drawn]
            exact = torch.stack([x.double() for x in inputs]).mean(0)
            magnitude = torch.stack([x.double().abs() for x in inputs]).mean(0)
            unit = torch.finfo(dtype).eps / 2
            bounds = {}
            for additions in (math.ceil(math.log2(p)), p - 1):
                # The bound is of first order: 1 % for the rest; and the reference itself rounds in float64.
                bounds[additions] = 1.01 * (additions + 1) * unit * magnitude + p * 2.0**-53 * magnitude
                if dtype == torch.float16:
                    bounds[additions] += p * 2.0**-25
            for name, function in FUNCTIONS.items():
                x = inputs[rank].clone()
                function(x)
                bound = bounds[math.ceil(math.log2(p)) if "doubling" in name else p - 1]
                case = f"{name} {length} {dtype}"
                if not ((x.double() - exact).abs() <= bound).all():
                    wrong.append(f"rank {rank}: {case}")
                checksums[case] = checksum(x)
    return wrong + differing_between_ranks(checksums)


def test_a_float16_mean_does_not_overflow_on_the_way() -> None:
    check_on_ranks(_check_float16, world_size=4)


def _check_float16() -> list[str]:
    wrong = []
    for name, function in FUNCTIONS.items():
        x = torch.full((5,), 60000.0, dtype=torch.float16)
        function(x)
        if x.tolist() != [60000.0] * 5:
            wrong.append(name)
    return wrong


# Tensors


@pytest.mark.parametrize("world_size", [1, 3])
def test_any_layout_is_reduced_in_place_and_autograd_sees_nothing(world_size: int) -> None:
    check_on_ranks(_check_layouts, world_size=world_size)


def _check_layouts() -> list[str]:
    wrong = []
    rank, p = dist.get_rank(), dist.get_world_size()
    base = torch.arange(240.0) + 1000 * rank
    mean = torch.arange(240.0) + 1000 * (p - 1) / 2
    views: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "scalar": lambda x: x[7],
        "transposed": lambda x: x.view(24, 10).t(),
        "strided": lambda x: x[1::3],
        "offset": lambda x: x[5:],
        "channels last": lambda x: x.view(2, 3, 8, 5).permute(0, 3, 1, 2),
        "stride 0 where the size is 1": lambda x: x.as_strided((3, 1), (2, 0)),
    }
    for name, function in FUNCTIONS.items():
        for layout, view in views.items():
            x = base.clone()
            function(view(x))
            expected = base.clone()
            view(expected).copy_(view(mean))
            if not torch.equal(x, expected):
                wrong.append(f"{name} {layout}")
        parameter = torch.nn.Parameter(base.clone())
        (parameter * 2).sum().backward()
        assert parameter.grad is not None
        parameter.grad += rank
        function(parameter)
        function(parameter.grad)
        if not torch.equal(parameter, mean) or parameter.grad_fn is not None or not parameter.requires_grad:
            wrong.append(f"{name} parameter")
        if not torch.equal(parameter.grad, torch.full((240,), 2 + (p - 1) / 2)):
            wrong.append(f"{name} gradient")
    return wrong


def test_a_tensor_kept_for_backward_and_changed_by_a_collective_is_an_error_there() -> None:
    check_on_ranks(_check_kept_for_backward, world_size=2)


def _check_kept_for_backward() -> list[str]:
    wrong = []
    for transport in TRANSPORTS:
        for name, call in {
            "all-reduce": partial(all_reduce, transport=transport),
            "reduce-scatter": partial(reduce_scatter, transport=transport),
            "reduce-scatter into": lambda kept, of=transport: reduce_scatter(torch.ones(20), into=kept, transport=of),
            "all-gather": partial(all_gather, transport=transport),
        }.items():
            weight, kept = torch.ones(10, requires_grad=True), torch.ones(10)
            product = weight * kept
            call(kept)
            try:
                product.sum().backward()
            except RuntimeError:
                continue
            wrong.append(f"{name} over {transport}")
    return wrong


def test_calls_in_and_out_of_inference_mode_share_scratch_memory() -> None:
    check_on_ranks(_check_inference_mode, world_size=2)


def _check_inference_mode() -> list[str]:
    with torch.inference_mode():
        all_reduce(torch.ones(10))
    x = torch.ones(10, requires_grad=True)
    all_reduce(x, op="sum")
    return [] if torch.equal(x, torch.full((10,), 2.0)) else ["outside inference mode"]


# Order and groups


def test_calls_follow_each_other_without_a_barrier_whatever_their_sizes() -> None:
    check_on_ranks(_check_sequence, world_size=4)


def _check_sequence() -> list[str]:
    wrong = []
    rank, p = dist.get_rank(), dist.get_world_size()
    other = torch.zeros(3)
    pending = dist.irecv(other, (rank - 1) % p)  # a caller's own message must not be taken for one of ours
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
    if other.tolist() != [float((rank - 1) % p)] * 3:
        wrong.append(f"rank {rank}: the caller's own message")
    return wrong


def test_groups_work_side_by_side_and_count_ranks_their_own_way() -> None:
    check_on_ranks(_check_groups, world_size=5)


def _check_groups() -> list[str]:
    wrong = []
    checksums: dict[str, int] = {}
    rank = dist.get_rank()
    layout = [[3, 0], [4, 1, 2]]
    groups = [dist.new_group(ranks) for ranks in layout]
    mine = next(i for i, ranks in enumerate(layout) if rank in ranks)
    members = layout[mine]
    for name, function in FUNCTIONS.items():
        for length in (1, 1000, 300_001):
            x = torch.arange(float(length)) + rank
            function(x, groups[mine], op="sum")
            if not torch.equal(x, len(members) * torch.arange(float(length)) + sum(members)):
                wrong.append(f"rank {rank}: {name} {length}")
            y = normal_numbers(rank, length, torch.float32)
            function(y, groups[mine])
            checksums[f"{name} {length}"] = checksum(y)
        x = torch.full((100,), float(rank))
        function(x)  # all ranks, between the groups' calls
        if not torch.equal(x, torch.full((100,), 2.0)):
            wrong.append(f"rank {rank}: {name} over all")
    try:
        all_reduce(torch.ones(1), groups[1 - mine])
        wrong.append("a group without this rank was taken")
    except ValueError as error:
        if "this rank belongs to" not in str(error):
            wrong.append(str(error))
    return wrong + differing_between_ranks(checksums, groups[mine])


# Scratch memory


@pytest.mark.parametrize("world_size", [2, 4])
def test_scratch_memory_is_bounded_kept_and_given_back(world_size: int) -> None:
    check_on_ranks(_check_scratch, world_size=world_size)


def _check_scratch() -> list[str]:
    p = dist.get_world_size()
    ring = partial(ring_all_reduce, transport=POINT_TO_POINT)
    limit = StreamTransport.scratch_limit_bytes
    found = {"before": scratch_bytes() == 0}
    for length in (1000, 400_000, 4_000_000):
        release_scratch()
        ring(torch.ones(length))
        chunk_bytes = -(-length // p) * 4
        # one chunk, and two pieces of it at the most, whatever its size; slots are rounded up to 64 bytes
        found[f"ring {length}"] = 0 < scratch_bytes() <= min(chunk_bytes + 2 * 64, limit)
    for name, function in ALL.items():
        function(torch.ones(4_000_000), transport=POINT_TO_POINT)
        found[f"{name} bounded"] = scratch_bytes() <= limit
    memory = find_transport(None, torch.device("cpu"), POINT_TO_POINT)._scratch._memory.data_ptr()  # type: ignore[attr-defined]
    ring(torch.ones(100))
    ring(torch.ones(4_000_000))
    kept = find_transport(None, torch.device("cpu"), POINT_TO_POINT)._scratch._memory.data_ptr()  # type: ignore[attr-defined]
    found["kept"] = memory == kept
    release_scratch()
    found["released"] = scratch_bytes() == 0
    x = torch.ones(1000)
    ring(x, op="sum")
    found["made again"] = scratch_bytes() > 0 and torch.equal(x, torch.full((1000,), float(p)))
    return [f"rank {dist.get_rank()}: {name}" for name, is_right in found.items() if not is_right]


def test_scratch_memory_goes_with_its_group() -> None:
    check_on_ranks(_check_group_lifetime, world_size=2)


def _check_group_lifetime() -> list[str]:
    group = dist.new_group([0, 1])
    ring_all_reduce(torch.ones(1000), group)
    before = len(choice._found)
    dist.destroy_process_group(group)
    del group
    return [] if (before, len(choice._found)) == (1, 0) else ["the group's scratch memory is still kept"]


# Batches, as NCCL needs them. gloo takes them too, and blocks where NCCL would: after each batch.


@pytest.mark.parametrize("world_size", thinned([1, 2, 3, 4, 5], lambda world_size: world_size in (3, 4)))
def test_every_algorithm_runs_in_batches(world_size: int) -> None:
    check_on_ranks(_check_batches, world_size=world_size)


def _check_batches() -> list[str]:
    wrong = []
    rank, p = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    assert group is not None
    BatchTransport.piece_bytes = 4096
    BatchTransport.scratch_limit_bytes = 2 * 4096
    batches = BatchTransport(group, torch.device("cpu"))
    reduction.find_transport = lambda group, device, preference: batches
    for name, function in ALGORITHMS.items():
        for length in (0, 1, 3, 1000, 30_001):
            x = torch.arange(float(length)) + rank
            function(x, op="sum")
            if not torch.equal(x, p * torch.arange(float(length)) + p * (p - 1) / 2):
                wrong.append(f"rank {rank}: {name} {length}")
    if batches.scratch_bytes() > batches.scratch_limit_bytes:
        wrong.append(f"scratch of {batches.scratch_bytes()} bytes")
    return wrong


# What is refused, and the chooser


def test_what_cannot_be_reduced_is_refused_with_what_was_expected() -> None:
    check_on_ranks(_check_errors, world_size=1)


def _check_errors() -> list[str]:
    wrong = []
    cases: list[tuple[str, Callable[[Any], None]]] = [
        ('"mean" or "sum"', lambda function: function(torch.ones(3), op="max")),
        ("float64, float32, float16, bfloat16", lambda function: function(torch.ones(3, dtype=torch.int64))),
        ("float64, float32, float16, bfloat16", lambda function: function(torch.ones(3, dtype=torch.complex64))),
        ("dense", lambda function: function(torch.ones(3).to_sparse())),
        ("share memory", lambda function: function(torch.ones(1).expand(3))),
        ("this rank belongs to", lambda function: function(torch.ones(3), dist.GroupMember.NON_GROUP_MEMBER)),
    ]
    for name, function in FUNCTIONS.items():
        for expected, call in cases:
            try:
                call(function)
                wrong.append(f"{name}: {expected}: accepted")
            except ValueError as error:
                if expected not in str(error):
                    wrong.append(f"{name}: {expected}: {error}")
    return wrong


def test_without_a_process_group_the_error_names_what_is_missing() -> None:
    with pytest.raises(ValueError, match="init_process_group"):
        all_reduce(torch.ones(3))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6, 8, 16, 32])
def test_the_chooser_knows_an_algorithm_for_everything(world_size: int) -> None:
    names = [choose_algorithm(1 << exponent, world_size) for exponent in range(31)]
    assert set(names) <= set(ALGORITHMS)
    assert choose_algorithm(0, world_size) == names[0]
    # few messages for the short, few bytes for the long
    assert names[0] == "recursive_doubling"
    assert names[-1] != "recursive_doubling"
    shared = [choose_algorithm(1 << exponent, world_size, SHARED) for exponent in range(31)]
    assert shared[0] == ("one_shot" if world_size > 2 else "recursive_doubling")
    assert shared[-1] == "butterfly"


# GPUs


@pytest.mark.gpu
def test_gloo_moves_cuda_tensors_through_the_host() -> None:
    check_on_ranks(_check_cuda, world_size=2)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU a rank")
def test_nccl_moves_cuda_tensors_in_place() -> None:
    wrong = run_ranks(_check_cuda, world_size=torch.cuda.device_count(), backend="nccl")
    assert [text for of_rank in wrong for text in of_rank] == []


def _check_cuda() -> list[str]:
    wrong = []
    rank, p = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    for name, function in FUNCTIONS.items():
        for length in LENGTHS:
            x = torch.arange(length, dtype=torch.float64, device=device) + rank
            function(x, op="sum")
            exact = p * torch.arange(length, dtype=torch.float64, device=device) + p * (p - 1) / 2
            if not torch.equal(x, exact):
                wrong.append(f"rank {rank}: {name} {length}")
    return wrong
