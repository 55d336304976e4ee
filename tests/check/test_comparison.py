"""What counts as a change since the baseline: rarely without one, surely with one, never where it
cannot be told."""

from itertools import product

import pytest

from labkit.bench.statistics import NO_DIFFERENCE_SHOWN
from labkit.check.comparison import compare
from labkit.check.facts import differences, has_lost_hardware
from labkit.machine.description import Gpu
from tests.cases import thinned
from tests.check.made_up import QUANTITIES, made_run

BUSY = {"average": 3.0, "busy_cores": 1.0}


def _baseline(first, runs, **noise):
    return [made_run(seed, **noise) for seed in range(first, first + runs)]


def _verdicts(changes):
    return {one.quantity: one.verdict for one in changes}


@pytest.mark.parametrize(
    ("runs", "drift"), thinned(product((1, 5), (0.0, 0.05)), lambda _, drift: drift > 0)
)
def test_an_unchanged_machine_is_rarely_said_to_have_changed(runs, drift):
    """A baseline of one run takes the usual drift; one of several knows this machine's."""
    changed = 0
    for seed in range(0, 300, 30):
        changes = compare(_baseline(seed, runs, drift=drift), made_run(1000 + seed, drift=drift))
        changed += sum(one.verdict != NO_DIFFERENCE_SHOWN for one in changes)
    assert changed <= 1  # of 60


def test_a_tenth_more_time_is_seen_on_a_steady_machine_that_was_measured_several_times():
    for seed in range(0, 100, 20):
        changes = compare(
            _baseline(seed, 3, drift=0.01),
            made_run(500 + seed, drift=0.01, slower={"attention": 1.1}),
        )
        attention = next(one for one in changes if one.quantity == "attention")
        assert attention.verdict == "slower"
        assert attention.low < 1.1 < attention.high
        assert sum(one.verdict == "slower" for one in changes) == 1


def test_what_all_quantities_share_hides_no_change_of_one_and_is_none_itself():
    """Cores whose speed varies by 10%: a fifth more time of one quantity is seen, and of nothing
    else."""
    for seed in range(0, 60, 20):
        baseline = _baseline(seed, 3, drift=0.01, shared=0.1)
        changes = compare(
            baseline, made_run(700 + seed, drift=0.01, shared=0.1, slower={"attention": 1.2})
        )
        assert [one.quantity for one in changes if one.verdict != NO_DIFFERENCE_SHOWN] == [
            "attention"
        ]
        assert all(0.7 < one.shared < 1.5 for one in changes)
        attention = next(one for one in changes if one.quantity == "attention")
        assert attention.low < 1.2 < attention.high


def test_the_smallest_change_that_would_be_seen_grows_with_drift_and_shrinks_with_runs():
    one, several, unsteady = (
        compare(_baseline(7, runs, drift=drift), made_run(99, drift=drift))
        for runs, drift in ((1, 0.0), (8, 0.0), (8, 0.05))
    )
    assert max(each.smallest_change for each in several) < min(each.smallest_change for each in one)
    assert max(each.smallest_change for each in several) < min(
        each.smallest_change for each in unsteady
    )


def _machine(**changes):
    return made_run(0).header.machine.model_copy(update=changes)


GPU = Gpu(name="NVIDIA H100", memory_bytes=8 * 2**30, compute_capability="9.0")


@pytest.mark.parametrize(
    ("baseline", "now", "reason"),
    [
        (None, {}, "no baseline"),
        ({}, {"machine": _machine(cores=1)}, "cores: 2 in the baseline, 1 now"),
        ({}, {"machine": _machine(cpu_quota=0.5)}, "quota 0.5"),
        ({}, {"machine": _machine(cpu="another")}, "processor"),
        ({"machine": _machine(gpus=[GPU])}, {}, "GPUs: 1x NVIDIA H100 in the baseline, none now"),
        ({}, {"load": BUSY}, "busy: other programs took 1.0 of 2 cores"),
        ({"load": BUSY}, {}, "in the baseline"),
        ({}, {"status": "failed"}, "rank 0 died"),
        ({}, {"sessions": 2}, "too few sessions"),
        (
            {"exchange": [1e-3] * 6},
            {"exchange": [2.1e-3] * 6},
            "cores exchange data for 2.1 times as long",
        ),
    ],
)
def test_what_cannot_be_compared_says_why(baseline, now, reason):
    changes = compare([] if baseline is None else [made_run(1, **baseline)], made_run(2, **now))
    assert changes
    assert all(one.verdict == "not comparable" and reason in one.reason for one in changes)


def test_another_torch_explains_a_change_and_forbids_no_comparison():
    """Also the label of a build: "+cpu"."""
    torch = made_run(0).header.machine.versions["torch"].partition("+")[0]
    upgraded = _machine(versions={"torch": f"{torch}+other"})
    baseline = made_run(1)
    now = made_run(2, machine=upgraded, slower={"matmul float32": 4.0})
    assert _verdicts(compare([baseline], now))["matmul float32"] == "slower"
    (torch_change,) = [one for one in differences(baseline, now) if one.name == "torch"]
    assert (torch_change.now, torch_change.forbids) == (f"{torch}+other", False)


def test_cores_that_a_host_moved_are_compared_with_runs_in_that_state():
    """Moved cores slow some quantities only. A machine on which all is slower, the exchange too,
    has not moved any."""
    near, apart, throttled = ([seconds] * 6 for seconds in (1e-3, 2e-3, 1.6e-3))
    baseline = [
        made_run(1, exchange=near),
        made_run(2, exchange=apart, slower={"copy": 1.5}),
        made_run(3, exchange=near),
    ]
    now = made_run(4, exchange=apart, slower={"copy": 1.5})
    assert set(_verdicts(compare(baseline, now)).values()) == {NO_DIFFERENCE_SHOWN}
    now = made_run(4, exchange=[*apart[:4], *near[:2]], slower={"copy": 1.5})
    assert set(_verdicts(compare(baseline, now)).values()) == {NO_DIFFERENCE_SHOWN}
    now = made_run(5, exchange=throttled, slower=dict.fromkeys(QUANTITIES, 1.6))
    assert set(_verdicts(compare(baseline, now)).values()) == {"slower"}


def test_lost_cores_and_gpus_count_as_lost_and_gained_ones_do_not():
    less = made_run(1, machine=_machine(cores=1))
    more = made_run(1)
    assert has_lost_hardware(more, less)
    assert not has_lost_hardware(less, more)
    assert not has_lost_hardware(more, more)
    assert has_lost_hardware(made_run(1, machine=_machine(gpus=[GPU])), more)
    assert has_lost_hardware(more, made_run(2, threads=1))


def test_what_else_differs_is_named_beside_the_comparison():
    now = made_run(2, machine=_machine(system="Linux 99", host="elsewhere"), threads=1)
    found = {one.name: (one.now, one.forbids) for one in differences(made_run(1), now)}
    assert found["system"] == ("Linux 99", False)
    assert found["threads (OMP_NUM_THREADS)"] == ("1", False)
    assert not differences(made_run(1), made_run(2))
