"""What an alternative that raised gets instead of a time, and what the others get."""

import re
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from labkit.parallel.collectives import ring_all_reduce
from labkit.parallel.launch import PointEnd, Row, launch
from labkit.studies.shared.alternatives import describe_failure, row_of, time_guarded

NO_PLAN = r"ValueError: no plan, line \d+ of test_alternatives.py"  # where it was raised


def _broken():
    raise ValueError("no plan\nand a page of details")


def test_the_reason_is_one_line():
    with pytest.raises(ValueError, match="no plan") as raised:
        _broken()
    assert re.fullmatch(NO_PLAN, describe_failure(raised.value, "cpu")["reason"])
    assert describe_failure(ValueError(), "cpu") == {"status": "failed", "reason": "ValueError"}
    assert describe_failure(MemoryError(), "cpu")["status"] == "oom"


def test_on_a_device_that_is_dead_nothing_is_told_of_any_alternative(monkeypatch):
    dead = RuntimeError("CUDA error: an illegal memory access was encountered")
    monkeypatch.setattr(torch.cuda, "synchronize", Mock(side_effect=dead))
    with pytest.raises(ValueError, match="the first to notice"):
        describe_failure(ValueError("the first to notice"), "cuda:1")


def test_those_that_run_are_timed_whatever_the_others_raise():
    alternatives = {
        "first": {"forward": int, "backward": _broken},
        "second": {"forward": int, "backward": int},
        "third": {"forward": _broken},
    }
    samples, failed = time_guarded(alternatives, device="cpu", warmup=1, repeats=3)
    assert {name: list(phases) for name, phases in samples.items()} == {
        "second": ["forward", "backward"]
    }
    assert all(len(seconds) == 3 for seconds in samples["second"].values())
    assert set(failed) == {"first", "third"}
    assert all(re.fullmatch(NO_PLAN, one["reason"]) for one in failed.values())


def test_an_error_in_its_inputs_is_an_alternatives_failure_and_one_of_options_is_raised():
    alternatives = {name: {"call": int} for name in ("broken", "first", "second")}
    prepare = {"broken": _broken, "first": int, "second": int}
    samples, failed = time_guarded(
        alternatives, device="cpu", warmup=1, repeats=8, prepare=lambda name: prepare[name]()
    )
    assert (set(samples), set(failed)) == ({"first", "second"}, {"broken"})
    with pytest.raises(ValueError, match="repeats"):
        time_guarded({"one": {"call": int}}, device="cpu", warmup=0, repeats=0)


def refused():
    raise RuntimeError("only with a GPU")


def too_large():
    raise MemoryError("no more")


def halfway():  # the ranks' tensors differ in length
    ring_all_reduce(torch.ones(100 * (1 + dist.get_rank())))


def out_of_memory_halfway():
    ring_all_reduce(torch.ones(100))
    raise MemoryError("no more")


def refused_by_one():
    if dist.get_rank() == 1:
        raise ValueError("only here")


def right():
    ring_all_reduce(tensor := torch.full((4,), float(dist.get_rank())))
    return tensor.tolist()


def _check_in_turn(actions):
    for action in actions:
        yield row_of(action.__name__, lambda action=action: {"result": action()}, device="cpu")


def test_what_all_ranks_refuse_is_left_out_and_any_other_failure_ends_the_point():
    """After the others a later alternative could meet messages that are still on their way."""
    ends_the_point = [halfway, out_of_memory_halfway, refused_by_one]
    points = [[refused, too_large, right], *([action] for action in ends_the_point)]
    rows = []
    ends = []
    for item in launch(_check_in_turn, points, world_size=2):
        if isinstance(item, PointEnd):
            ends.append(item)
        if isinstance(item, Row) and (item.index, item.rank) == (0, 0):
            rows.append(item.values)
    line = r"line \d+ of test_alternatives.py"
    assert re.fullmatch(rf"RuntimeError: only with a GPU, {line}", rows[0]["reason"])
    assert rows[1:] == [{"status": "oom", "reason": "no more"}, {"result": [0.5] * 4}]
    assert [end.status for end in ends] == ["ok", "failed", "oom", "failed"]
    assert re.fullmatch(rf"rank \d: RuntimeError: .* sent .*, {line}, in halfway", ends[1].reason)
    assert ends[2].failure.alternative == "out_of_memory_halfway"
    assert re.fullmatch(
        rf"rank 1: ValueError: only here, {line}, in refused_by_one", ends[3].reason
    )
