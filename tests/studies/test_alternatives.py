"""What an alternative that raised gets instead of a time, and what the others get."""

import re

import pytest
import torch

from labkit.studies.shared.alternatives import reason_of, time_those_that_run

NO_PLAN = r"failed: ValueError: no plan, line \d+ of test_alternatives.py"  # where it was raised


def _broken():
    raise ValueError("no plan\nand a page of details")


def test_the_reason_is_one_line():
    with pytest.raises(ValueError, match="no plan") as found:
        _broken()
    assert re.fullmatch(NO_PLAN, reason_of(found.value, "cpu"))
    assert reason_of(ValueError(), "cpu") == "failed: ValueError"
    assert reason_of(MemoryError(), "cpu").startswith("out of memory")


def test_on_a_device_that_is_dead_nothing_is_told_of_any_alternative(monkeypatch):
    def dead():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", dead)
    with pytest.raises(ValueError, match="the first to notice"):
        reason_of(ValueError("the first to notice"), "cuda:1")


def test_those_that_run_are_timed_whatever_the_others_raise():
    alternatives = {
        "first": {"forward": int, "backward": _broken},
        "second": {"forward": int, "backward": int},
        "third": {"forward": _broken},
    }
    samples, failed = time_those_that_run(alternatives, device="cpu", warmup=1, repeats=3)
    assert {name: list(phases) for name, phases in samples.items()} == {"second": ["forward", "backward"]}
    assert all(len(seconds) == 3 for seconds in samples["second"].values())
    assert set(failed) == {"first", "third"}
    assert all(re.fullmatch(NO_PLAN, reason) for reason in failed.values())


def test_what_no_alternative_is_to_blame_for_is_raised():
    with pytest.raises(ValueError, match="no plan"):
        time_those_that_run({"one": {"call": int}}, device="cpu", warmup=0, repeats=1, before=_broken)
    with pytest.raises(ValueError, match="repeats"):
        time_those_that_run({"one": {"call": int}}, device="cpu", warmup=0, repeats=0)
