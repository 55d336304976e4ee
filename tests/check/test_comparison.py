"""What counts as a change since the baseline: rarely without one, surely with one, never where it cannot be told."""

import pytest

from labkit.check.comparison import circumstances, compare, lost_hardware
from labkit.machine import Gpu
from tests.check.made_up import made_run

BUSY = {"average": 3.0, "other_measurements": 0, "busy_cores": 1.0}


def test_an_unchanged_machine_is_rarely_said_to_have_changed():
    baselines = [made_run(seed) for seed in range(5)]
    changes = [
        one for seed in range(100, 160) for one in compare(baselines[seed % 5], made_run(seed)) if one.ratio is not None
    ]
    assert len(changes) == 360
    assert sum(one.verdict != "no change shown" for one in changes) <= 2


def test_a_tenth_more_time_is_seen_where_it_is_and_with_its_size():
    for seed in range(10):
        changes = {one.quantity: one for one in compare(made_run(seed), made_run(50 + seed, slower={"attention": 1.1}))}
        attention = changes.pop("attention")
        assert attention.verdict == "slower"
        assert attention.low < 1.1 < attention.high
        assert {one.verdict for one in changes.values()} == {"no change shown"}


def test_the_smallest_change_that_would_be_seen_is_told_and_grows_with_noise():
    quiet, loud = (compare(made_run(1, between=noise), made_run(2, between=noise)) for noise in (0.01, 0.1))
    assert all(1.03 <= one.smallest_seen < 1.1 for one in quiet)
    assert all(one.smallest_seen > 1.15 for one in loud)


def _machine(**changes):
    return made_run(0).header.machine.model_copy(update=changes)


GPU = Gpu(name="NVIDIA H100", memory_bytes=8 * 2**30, compute_capability="9.0", dense_bf16_peak_tflops=None)


@pytest.mark.parametrize(
    ("baseline", "now", "reason"),
    [
        (None, {}, "no baseline"),
        ({}, {"machine": _machine(cores=1)}, "cores: 2 in the baseline, 1 now"),
        ({}, {"machine": _machine(cpu_quota=0.5)}, "quota 0.5"),
        ({}, {"machine": _machine(cpu="another")}, "processor"),
        ({"machine": _machine(gpus=[GPU])}, {}, "GPUs: 1x NVIDIA H100 in the baseline, none now"),
        ({}, {"machine": _machine(versions={"torch": "1.0"})}, "torch"),
        ({}, {"load": BUSY}, "busy: other programs took 1.0 of 2 cores"),
        ({"load": BUSY}, {}, "in the baseline"),
        ({}, {"status": "failed"}, "rank 0 died"),
        ({}, {"sessions": 2}, "not measured"),
    ],
)
def test_what_cannot_be_compared_says_why(baseline, now, reason):
    changes = compare(None if baseline is None else made_run(1, **baseline), made_run(2, **now))
    assert changes
    assert all(one.verdict == "not comparable" and reason in one.reason for one in changes)


def test_lost_cores_and_gpus_count_as_lost_and_gained_ones_do_not():
    less, more = made_run(1, machine=_machine(cores=1)), made_run(1)
    assert lost_hardware(more, less)
    assert not lost_hardware(less, more)
    assert not lost_hardware(more, more)
    assert lost_hardware(made_run(1, machine=_machine(gpus=[GPU])), more)


def test_what_else_differs_is_named_beside_the_comparison():
    now = made_run(2, machine=_machine(system="Linux 99", host="elsewhere"), threads=1)
    notes = list(circumstances(made_run(1), now))
    assert any(note.startswith("system: ") and "Linux 99" in note for note in notes)
    assert any("threads" in note and note.endswith("2 in the baseline, 1 now") for note in notes)
    assert not list(circumstances(made_run(1), made_run(2)))
