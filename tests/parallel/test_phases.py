"""Reduce-scatter and all-gather against the exact answer, and against the all-reduce they are the phases of.

Ranks are started once per number of ranks and go through all cases; they return what was wrong, in words.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

from labkit.costs.communication import ALL_GATHER_COSTS, REDUCE_SCATTER_COSTS
from labkit.parallel.chooser import choose_phase_algorithm
from labkit.parallel.collectives import ALGORITHMS, all_gather, reduce_scatter
from labkit.parallel.launch import run_ranks
from labkit.parallel.phases import ALL_GATHERS, REDUCE_SCATTERS
from labkit.parallel.transport import POINT_TO_POINT, SHARED, TRANSPORTS, find_transport
from labkit.parallel.transport.contract import Step, Transport, add_up
from tests.cases import thinned

pytestmark = pytest.mark.usefixtures("workers_travel_by_value")

CPU = torch.device("cpu")
NAMES = ("auto", *REDUCE_SCATTERS)
FLOATS = {torch.float64: 2**40, torch.float32: 2**20, torch.float16: 2**7, torch.bfloat16: 2**5}
OTHERS = (torch.int64, torch.bool, torch.float8_e4m3fn)


@dataclass(frozen=True)
class Case:
    length: int
    sizes: tuple[int, ...] | None = None
    dtype: torch.dtype = torch.float32


def cases(p: int) -> list[Case]:
    even = [Case(length) for length in (0, 1, 3, 1000, 300_001)]
    of_types = [Case(1003, dtype=dtype) for dtype in FLOATS]
    uneven = [
        Case(700, (700, *[0] * (p - 1))),
        Case(700, (*[0] * (p - 1), 700)),
        Case(100 * p, (50, *[100] * (p - 2), 150)),
        Case(5 * (p - 1), (5, 0, *[5] * (p - 2))),
        Case(400_003, (300_001, *[1] * (p - 2), 100_004 - p), torch.float64),
    ]
    return even + of_types + uneven


def shard_of(vector: torch.Tensor, sizes: Sequence[int] | None, rank: int) -> torch.Tensor:
    p = dist.get_world_size()
    return (vector.tensor_split(p) if sizes is None else vector.split(list(sizes)))[rank]


def numbers(rank: int, case: Case) -> torch.Tensor:
    """Whole numbers above 0, another at every place and rank as far as the type allows, whose sums are exact."""
    places = torch.arange(rank, 8 * case.length + rank, 8, dtype=torch.int64)
    return (places * 7919 % (FLOATS[case.dtype] - 1) + 1).to(case.dtype)


def inputs_and_total(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's numbers, and the sum of all ranks'."""
    of_ranks = [numbers(rank, case) for rank in range(dist.get_world_size())]
    total = torch.zeros(case.length, dtype=torch.float64)
    for of_rank in of_ranks:
        total += of_rank
    return of_ranks[dist.get_rank()], total.to(case.dtype)


@pytest.mark.parametrize("world_size", thinned([2, 3, 4, 5], lambda world_size: world_size in (3, 4)))
def test_both_phases_are_exact_and_miss_no_contribution(world_size: int) -> None:
    wrong = run_ranks(_check_phases, world_size=world_size)
    assert [text for of_rank in wrong for text in of_rank] == []


def _check_phases() -> list[str]:
    return [
        *_check_exact(),
        *_check_against_all_reduce(),
        *_check_lost_contributions(),
        *_check_views(),
        *_check_other_types(),
        *_check_bytes_sent(),
        *_check_refusals(),
    ]


def _check_exact() -> list[str]:
    wrong = []
    rank = dist.get_rank()
    for case in cases(dist.get_world_size()):
        mine, total = inputs_and_total(case)
        for transport in TRANSPORTS:
            for name in NAMES:
                x = mine.clone()
                reduce_scatter(x, op="sum", sizes=case.sizes, algorithm=name, transport=transport)
                if not torch.equal(shard_of(x, case.sizes, rank), shard_of(total, case.sizes, rank)):
                    wrong.append(f"rank {rank}: reduce-scatter {name} {transport} {case}")
                own = torch.full_like(shard_of(x, case.sizes, rank), torch.nan)
                reduce_scatter(mine.clone(), op="sum", sizes=case.sizes, algorithm=name, transport=transport, into=own)
                if not torch.equal(own, shard_of(x, case.sizes, rank)):
                    wrong.append(f"rank {rank}: reduce-scatter {name} {transport} {case} into another vector")
                y = torch.full_like(x, torch.nan)
                shard_of(y, case.sizes, rank).copy_(shard_of(x, case.sizes, rank))
                all_gather(y, sizes=case.sizes, algorithm=name, transport=transport)
                if not torch.equal(y, total):
                    wrong.append(f"rank {rank}: all-gather {name} {transport} {case}")
    return wrong


def _check_against_all_reduce() -> list[str]:
    """The mean of numbers that round: the same bits as the all-reduce by that algorithm, and near the exact one."""
    wrong = []
    rank, p = dist.get_rank(), dist.get_world_size()
    for dtype in FLOATS:
        # only what is longer than a piece is cut into some
        for length in (7, 1000, 300_001 if dtype == torch.float64 else 10_001):
            inputs = [torch.randn(length, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(p)]
            exact, magnitude = (
                torch.stack([x.double() for x in stack]).mean(0) for stack in (inputs, [x.abs() for x in inputs])
            )
            bound = (p + 1) * torch.finfo(dtype).eps / 2 * magnitude + p * 2.0**-25 * (dtype == torch.float16)
            for name in REDUCE_SCATTERS:
                for transport in TRANSPORTS:
                    reduced, x, y = (inputs[rank].clone() for _ in range(3))
                    ALGORITHMS[name](reduced, transport=transport)
                    reduce_scatter(x, algorithm=name, transport=transport)
                    elsewhere = torch.full_like(shard_of(y, None, rank), torch.nan)
                    reduce_scatter(y, algorithm=name, transport=transport, into=elsewhere)
                    ends = [shard_of(reduced, None, rank), shard_of(x, None, rank), elsewhere]
                    same = all(torch.equal(ends[0], end) for end in ends)
                    all_gather(x, algorithm=name, transport=transport)
                    if not same or not torch.equal(x, reduced) or not ((x.double() - exact).abs() <= bound).all():
                        wrong.append(f"rank {rank}: {name} {transport} {dtype} {length}")
    return wrong


class Lossy:
    """A transport on which nothing that one rank sends arrives, and all else does."""

    def __init__(self, via: Transport, lost: int):
        self._via, self._lost = via, lost
        self.name, self.rank, self.world_size, self.device = via.name, via.rank, via.world_size, via.device
        self.piece_bytes, self.shown_bytes = via.piece_bytes, via.shown_bytes
        self.sent_bytes = 0

    def run(self, steps: Sequence[Step], depth: int = 1) -> None:
        self.sent_bytes += sum(step.outgoing.nbytes for step in steps if step.outgoing is not None)
        self._via.run([self._without(step) for step in steps], depth)

    def _without(self, step: Step) -> Step:
        if step.source != self._lost or step.incoming is None:
            return step
        return step._replace(incoming=torch.empty_like(step.incoming))

    def show(self, part: torch.Tensor) -> list[torch.Tensor]:
        self.sent_bytes += part.nbytes * (self.world_size - 1)
        return [
            torch.zeros_like(shown) if rank == self._lost != self.rank else shown
            for rank, shown in enumerate(self._via.show(part))
        ]

    def add_shown(self, part: torch.Tensor, start: int, stop: int, divisor: int) -> None:
        add_up(self.show(part), part, start, stop, divisor)


def _check_lost_contributions() -> list[str]:
    """Without the messages of one rank, whichever, every case above is wrong on some rank: so the cases can tell."""
    wrong = []
    rank, p = dist.get_rank(), dist.get_world_size()
    chosen = [Case(1000), Case(100 * p, (50, *[100] * (p - 2), 150)), Case(300_001, dtype=torch.bfloat16)]
    for case in chosen:
        mine, total = inputs_and_total(case)
        right = shard_of(total, case.sizes, rank)
        for transport in TRANSPORTS:
            for name in REDUCE_SCATTERS:
                for lost in range(p):
                    via: Any = Lossy(find_transport(None, CPU, transport), lost)
                    x, y = mine.clone(), torch.full((case.length,), torch.nan, dtype=case.dtype)
                    shard_of(y, case.sizes, rank).copy_(right)
                    reduce_scatter(x, op="sum", sizes=case.sizes, algorithm=name, transport=via)
                    all_gather(y, sizes=case.sizes, algorithm=name, transport=via)
                    is_right = [torch.equal(shard_of(x, case.sizes, rank), right), torch.equal(y, total)]
                    everywhere = torch.tensor([int(each) for each in is_right])
                    dist.all_reduce(everywhere, op=dist.ReduceOp.MIN)
                    if any(everywhere.tolist()):
                        wrong.append(f"{everywhere.tolist()} {name} {transport} {case} without rank {lost}")
    return wrong


def _check_views() -> list[str]:
    """Parts of larger tensors, whatever their strides, parameters too; what lies around them stays as it is."""
    wrong = []
    rank, p = dist.get_rank(), dist.get_world_size()
    views: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "scalar": lambda x: x[7],
        "offset": lambda x: x[5:],
        "transposed": lambda x: x.view(24, 10).t(),
        "strided": lambda x: x[1::3],
    }
    for name in NAMES:
        for transport in TRANSPORTS:
            for kind, view in views.items():
                base = torch.arange(240.0) + 1000 * rank
                parameter = torch.nn.Parameter(view(base))
                reduce_scatter(parameter, algorithm=name, transport=transport)
                all_gather(parameter, algorithm=name, transport=transport)
                expected = torch.arange(240.0) + 1000 * rank
                view(expected).sub_(1000 * rank).add_(1000 * (p - 1) / 2)
                if not torch.equal(base, expected) or parameter.grad_fn is not None:
                    wrong.append(f"rank {rank}: {name} {transport} {kind}")
    return wrong


def _check_other_types() -> list[str]:
    wrong = []
    rank, p = dist.get_rank(), dist.get_world_size()
    for dtype in OTHERS:
        whole = (torch.arange(4 * p + 1) % 2).to(dtype)
        for name in NAMES:
            x = torch.zeros_like(whole)
            shard_of(x, None, rank).copy_(shard_of(whole, None, rank))
            all_gather(x, algorithm=name)
            if x.view(torch.uint8).tolist() != whole.view(torch.uint8).tolist():
                wrong.append(f"rank {rank}: {name} {dtype}")
    return wrong


def _check_bytes_sent() -> list[str]:
    """As many as the formulas say, to the byte: for the rank that sends most, where shards are even."""
    wrong = []
    p, length = dist.get_world_size(), 60_000
    for name in REDUCE_SCATTERS:
        for collective, cost in ((reduce_scatter, REDUCE_SCATTER_COSTS[name]), (all_gather, ALL_GATHER_COSTS[name])):
            via: Any = Lossy(find_transport(None, CPU, POINT_TO_POINT), lost=-1)
            collective(torch.ones(length), algorithm=name, transport=via)
            most = torch.tensor(via.sent_bytes)
            dist.all_reduce(most, op=dist.ReduceOp.MAX)
            predicted = cost(p, 4 * length).n_bytes
            is_folded = name == "halving_doubling" and p & (p - 1)
            # With ranks folded in, the critical path is longer than what one rank sends.
            if not (most <= predicted if is_folded else most == predicted):
                wrong.append(f"{collective.__name__} {name}: {int(most)} bytes, predicted {predicted}")
    return wrong


def _check_refusals() -> list[str]:
    wrong = []
    p = dist.get_world_size()
    half: Any = torch.ones(6, dtype=torch.float16)
    outside: Any = dist.GroupMember.NON_GROUP_MEMBER
    calls: list[tuple[str, Callable[[], None]]] = [
        ("shards", lambda: reduce_scatter(half, sizes=[6])),
        ("into", lambda: reduce_scatter(half, into=torch.empty(6, dtype=torch.float16))),
        ("into", lambda: reduce_scatter(half, into=torch.empty(len(shard_of(half, None, dist.get_rank()))))),
        ("share elements", lambda: reduce_scatter(half, into=half[-len(shard_of(half, None, dist.get_rank())) :])),
        ("shards", lambda: all_gather(half, sizes=[1] * p + [6 - p])),
        ("shards", lambda: reduce_scatter(half, sizes=[7, -1, *[0] * (p - 2)])),
        ("shards", lambda: all_gather(half, sizes=[2] * p + [1])),
        ("algorithm", lambda: reduce_scatter(half, algorithm="recursive_doubling")),
        ("algorithm", lambda: all_gather(half, algorithm="tree")),
        ("dense", lambda: all_gather(half.to_sparse())),
        ("share memory", lambda: all_gather(half[:1].expand(6))),
        ("op", lambda: reduce_scatter(half, op="max")),
        ("float64", lambda: reduce_scatter(torch.ones(6, dtype=torch.int64))),
        ("this rank belongs to", lambda: all_gather(half, outside)),
    ]
    for expected, call in calls:
        try:
            call()
            wrong.append(f"{expected}: accepted")
        except ValueError as error:
            if expected not in str(error):
                wrong.append(f"{expected}: {error}")
    return wrong + ([] if half.tolist() == [1.0] * 6 else ["changed before it was refused"])


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8, 32])
@pytest.mark.parametrize("transport", [POINT_TO_POINT, SHARED])
def test_the_chooser_knows_an_algorithm_for_both_phases(world_size: int, transport: str) -> None:
    names = {choose_phase_algorithm(1 << exponent, world_size, transport) for exponent in range(31)}
    assert names <= set(REDUCE_SCATTERS) & set(ALL_GATHERS)


def test_one_rank_alone_has_everything() -> None:
    assert run_ranks(_alone, world_size=1) == [[]]


def _alone() -> list[str]:
    wrong = []
    for name in NAMES:
        x = torch.arange(5.0)
        reduce_scatter(x, algorithm=name)
        all_gather(x, algorithm=name)
        if x.tolist() != [0.0, 1.0, 2.0, 3.0, 4.0]:
            wrong.append(name)
    return wrong
