"""Ranks agree, or all raise with the reason of the rank that cannot go on, and then go on."""

from collections.abc import Callable, Mapping
from functools import partial

import pytest
import torch
import torch.distributed as dist

from labkit.parallel.agreement import agree_once, agree_per_pass, describe_values
from labkit.parallel.launch import RankError, run_ranks
from labkit.parallel.messages import gather_json
from tests.parallel.shared_ranks import on_ranks

AGREE = {
    "once": agree_once,
    "per pass": agree_per_pass,
    "per pass, point to point": partial(agree_per_pass, transport="point_to_point"),
}


def _of_rank(values: Mapping[int, object], otherwise: object) -> Mapping[str, object]:
    value = values.get(dist.get_rank(), otherwise)
    if isinstance(value, Exception):
        raise value
    return {"dtype": "float32", "shape": value}


DIFFERENT = {
    "a value": ("rank 0 has shape=(2,), rank 1 has (3,)", {1: (3,)}),
    "a reason": ("rank 1: on meta", {1: ValueError("on meta")}),
    "another kind of error": ("rank 1: KeyError: 'bias'", {1: KeyError("bias")}),
    "two reasons": ("rank 0: on meta", {0: ValueError("on meta"), 1: ValueError("lazy")}),
    "several lines": ("rank 1: on meta", {1: ValueError("on meta\nwhere?")}),
}


def _error(agree: Callable[..., object], values: Mapping[int, object]) -> Exception | None:
    try:
        agree("tensor", lambda: _of_rank(values, (2,)))
    except Exception as error:
        return error
    return None


@on_ranks(3, slow=(2,))
@pytest.mark.parametrize("way", AGREE)
@pytest.mark.parametrize("case", DIFFERENT)
def test_all_ranks_raise_the_reason_of_one_and_go_on(way, case):
    expected, values = DIFFERENT[case]
    own = values.get(dist.get_rank())
    error = _error(AGREE[way], values)
    if isinstance(own, Exception):
        assert error is own
    else:
        assert isinstance(error, ValueError)
        assert expected in str(error)
    # The caller has caught the error: the next call is matched on all ranks.
    assert _error(AGREE[way], {}) is None


def _named(*names: str) -> dict[str, object]:
    return dict.fromkeys(names, 1)


@on_ranks(2)
@pytest.mark.parametrize(
    ("expected", "descriptions"),
    [
        ("rank 0 has bias", [_named("weight", "bias"), _named("weight")]),
        ("rank 1 has bias", [_named("weight"), _named("weight", "bias")]),
        ("another order", [_named("weight", "bias"), _named("bias", "weight")]),
    ],
)
def test_descriptions_differ_in_names_or_their_order(expected, descriptions):
    with pytest.raises(ValueError, match=expected):
        agree_once("model", lambda: descriptions[dist.get_rank()])


@on_ranks(3)
def test_ranks_of_a_subgroup_agree_without_the_others():
    group = dist.new_group([2, 0])
    rank = dist.get_rank()
    if rank == 1:
        return
    place = dist.get_group_rank(group, rank)
    agree_once("model", lambda: {"size": 3}, group)
    rows = agree_per_pass("pass", dict, group, numbers=[place, -(2**62) + place])
    assert rows == [[0, -(2**62)], [1, -(2**62) + 1]]


@on_ranks(2)
def test_many_calls_leave_few_keys_in_the_store():
    store = dist.GroupMember.WORLD.get_group_store()
    gather_json(0)
    before = store.num_keys()
    for value in range(20):
        assert gather_json([value, dist.get_rank()]) == [[value, 0], [value, 1]]
    dist.barrier()
    assert store.num_keys() <= before + 4


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.uint8, torch.bool, torch.bfloat16, torch.complex64]
)
def test_values_are_described_by_their_order(dtype):
    tensor = torch.tensor([[1, 0], [0, 0]]).to(dtype)
    assert describe_values(tensor) != describe_values(tensor.flip(0))
    assert describe_values(tensor) == describe_values(tensor.clone())


def _refuse_on_rank_1():
    def describe():
        if dist.get_rank() == 1:
            raise ValueError("on meta")
        return {}

    agree_once("model", describe)


def test_a_failed_launch_shows_the_rank_with_the_reason():
    with pytest.raises(RankError, match="rank 1: ValueError: on meta"):
        run_ranks(_refuse_on_rank_1, world_size=3)
