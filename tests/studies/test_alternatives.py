"""What an alternative that raised gets instead of a time, and what the others get."""

import re
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from labkit.parallel.collectives import ring_all_reduce
from labkit.parallel.launch import Retry, Row, launch
from labkit.studies.shared.alternatives import describe_failure, row_of, time_guarded

NO_PLAN = r"failed: ValueError: no plan, line \d+ of test_alternatives.py"  # where it was raised


def _broken():
    raise ValueError("no plan\nand a page of details")


def test_the_reason_is_one_line():
    with pytest.raises(ValueError, match="no plan") as raised:
        _broken()
    assert re.fullmatch(NO_PLAN, describe_failure(raised.value, "cpu"))
    assert describe_failure(ValueError(), "cpu") == "failed: ValueError"
    assert describe_failure(MemoryError(), "cpu").startswith("out of memory")


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
    assert all(re.fullmatch(NO_PLAN, reason) for reason in failed.values())


def test_an_error_in_its_inputs_is_an_alternatives_failure_and_one_of_options_is_raised():
    alternatives = {name: {"call": int} for name in ("broken", "first", "second")}
    prepare = {"broken": _broken, "first": int, "second": int}
    samples, failed = time_guarded(
        alternatives, device="cpu", warmup=1, repeats=8, prepare=lambda name: prepare[name]()
    )
    assert (set(samples), set(failed)) == ({"first", "second"}, {"broken"})
    with pytest.raises(ValueError, match="repeats"):
        time_guarded({"one": {"call": int}}, device="cpu", warmup=0, repeats=0)


def _in_turns(_):
    """On all ranks two are out of memory, the second with a message on its way, and one leaves a
    collective halfway."""

    def out_of_memory():
        raise MemoryError("no more")

    def out_of_memory_later():
        if dist.get_rank() == 1:
            sent.append(dist.isend(torch.full((4,), 9.0), 0))
        raise MemoryError("no more")

    def next_message():
        if dist.get_rank() == 1:
            sent.append(dist.isend(torch.full((4,), 1.0), 0))
            return None
        dist.recv(tensor := torch.zeros(4), 1)
        return tensor.tolist()

    def halfway():  # the ranks' tensors differ in length
        ring_all_reduce(torch.ones(100 * (1 + dist.get_rank())))

    def right():
        ring_all_reduce(tensor := torch.full((4,), float(dist.get_rank())))
        return tensor.tolist()

    sent = []
    for action in (out_of_memory, out_of_memory_later, next_message, halfway, right):
        row = row_of(action.__name__, lambda action=action: {"result": action()}, device="cpu")
        yield {"name": action.__name__, "result": row.get("check", row.get("result"))}


def test_a_collective_that_all_ranks_left_halfway_costs_no_later_alternative():
    items = list(launch(_in_turns, [None], world_size=2))
    at = max(number for number, item in enumerate(items) if isinstance(item, Retry))
    result = {
        item.values["name"]: item.values["result"]
        for item in items[at:]
        if isinstance(item, Row) and not item.rank
    }
    assert result["out_of_memory"] == result["out_of_memory_later"] == "out of memory: no more"
    assert result["next_message"] == [1.0] * 4
    assert re.match(r"failed: RuntimeError: .*rank \d sent \d+ bytes", result["halfway"])
    assert result["right"] == [0.5] * 4
