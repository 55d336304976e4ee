"""How many rounds are timed: by the spread of a pilot and by the time, alike on all ranks; and what
coverage and power that leaves."""

from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest
import torch.distributed as dist

from labkit.bench import clock
from labkit.bench.clock import MIN_ROUNDS, PILOT_ROUNDS, plan_rounds, time_interleaved
from labkit.bench.intervals import FALSE_DISCOVERY_RATE, estimate_paired
from labkit.parallel.messages import gather_json
from tests.parallel.shared_ranks import on_ranks

MOST = 60
GAIN = 0.1


def noise(spread, seed=0, names=2):
    rng = np.random.default_rng(seed)
    return np.exp(rng.normal(0, spread, (names, PILOT_ROUNDS + MOST)))


def planned(times, *, most=MOST, gain=GAIN, rounds_s=1e9, seconds=(1.0, 0.0)):
    """The plan after the first rounds of `times`, (alternatives, rounds)."""
    pilot = {str(name): {"all": list(one[:PILOT_ROUNDS])} for name, one in enumerate(times)}
    return plan_rounds(pilot, *seconds, gain=gain, rounds_s=rounds_s, most=most)


def test_steady_alternatives_need_few_rounds_and_noisy_ones_more():
    plans = [planned(noise(spread)) for spread in (0.001, 0.05, 0.1, 0.5)]
    rounds = [plan.rounds for plan in plans]
    assert rounds == sorted(rounds)
    assert rounds[0] == MIN_ROUNDS < rounds[2]
    assert rounds[-1] == MOST
    assert not any(plan.keeps_pilot for plan in plans)


def test_the_noisiest_part_counts():
    steady = noise(0.001)
    noisy = noise(0.5)
    pilot = {str(n): {"forward": steady[n, :6], "backward": noisy[n, :6]} for n in range(2)}
    assert plan_rounds(pilot, 1.0, 0.0, gain=GAIN, rounds_s=1e9, most=MOST).rounds == MOST


@pytest.mark.parametrize("seed", range(5))
def test_where_the_ratio_lies_has_no_part_in_it(seed):
    times = noise(0.08, seed)
    assert planned(times) == planned(times * [[1.0], [3.0]]) == planned(times[::-1])


def test_a_pilot_counts_if_there_is_no_time_for_the_rounds_that_power_needs():
    noisy = noise(0.5)
    assert planned(noisy, rounds_s=0.5) == (0, True)
    assert planned(noisy, rounds_s=3.0) == (2 * PILOT_ROUNDS, True)
    assert planned(noise(0.001), rounds_s=3.0) == (MIN_ROUNDS, False)
    assert planned(noisy, gain=0.0, rounds_s=1e9) == (MOST - PILOT_ROUNDS, True)


def test_rounds_may_take_a_share_of_a_long_set_up():
    """Six rounds after a minute of compiling would leave undecided what ten seconds more decide."""
    noisy = noise(0.5)
    short = planned(noisy, rounds_s=1.0, seconds=(1.0, 1.0))
    assert short.rounds == 0
    assert planned(noisy, rounds_s=1.0, seconds=(1.0, 20.0)).rounds > 4 * PILOT_ROUNDS


def test_the_set_up_is_the_time_since_the_point_or_its_last_rounds(monkeypatch):
    now = SimpleNamespace(s=0.0)
    monkeypatch.setattr(clock.time, "perf_counter", lambda: now.s)

    def pass_time(seconds=0.5):
        now.s += seconds

    clock.set_up.start()
    pass_time(100.0)
    options = {"warmup": 0, "repeats": MOST, "rounds_s": 3.0}
    assert len(time_interleaved({"a": pass_time}, **options)["a"]) == MOST  # 30 s of 0.5 s
    assert len(time_interleaved({"a": pass_time}, **options)["a"]) == PILOT_ROUNDS


@on_ranks(2)
def test_ranks_take_as_many_rounds_as_the_slowest_of_them_need():
    rank = dist.get_rank()
    # what the steady rank waits for
    slower = np.maximum(1.0, noise(0.5, seed=3)) if rank else np.ones((2, MOST))
    times = iter(slower.ravel())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clock, "_time_calls", lambda action, calls, is_cuda: next(times))
        samples = time_interleaved({"a": int, "b": int}, warmup=0, repeats=30, gain=GAIN)
    rounds = gather_json(len(samples["a"]))
    assert rounds[0] == rounds[1] > MIN_ROUNDS


def test_the_rounds_of_a_pilot_are_none_of_the_samples(monkeypatch):
    numbers = count()
    monkeypatch.setattr(clock, "_time_calls", lambda *_: 1.0 + 1e-6 * next(numbers))
    samples = time_interleaved({"a": int}, warmup=2, repeats=30, gain=GAIN)["a"]
    assert samples[0] == pytest.approx(1.0 + 1e-6 * (2 + PILOT_ROUNDS), abs=1e-9)
    assert len(samples) == MIN_ROUNDS


NOISES = {
    "log-normal, 5 %": lambda rng, shape: rng.normal(0, 0.05, shape),
    "log-normal, 10 %": lambda rng, shape: rng.normal(0, 0.1, shape),
    "t2": lambda rng, shape: 0.05 * rng.standard_t(2, shape),
    "outliers": lambda rng, shape: rng.normal(0, 0.04, shape) + 0.5 * (rng.random(shape) < 0.1),
}


def estimates(distribution, rounds_s, tries=400, gain=0.0):
    """The estimates of a ratio of `1 - gain`, each by as many rounds as its pilot asks for."""
    rng = np.random.default_rng(7)
    for _ in range(tries):
        times = np.exp(NOISES[distribution](rng, (2, PILOT_ROUNDS + MOST))) * [[1 - gain], [1.0]]
        plan = planned(times, rounds_s=rounds_s)
        start = 0 if plan.keeps_pilot else PILOT_ROUNDS
        yield estimate_paired(np.log(times[0] / times[1])[start : PILOT_ROUNDS + plan.rounds])


@pytest.mark.parametrize("rounds_s", [2.5, 1e9], ids=["time decides", "spread decides"])
@pytest.mark.parametrize("distribution", NOISES)
def test_a_pilot_makes_neither_intervals_too_narrow_nor_claims_too_many(distribution, rounds_s):
    found = list(estimates(distribution, rounds_s))
    covered = np.mean([one.low <= 0 <= one.high for one in found])
    assert covered >= 0.95 - 3 * np.sqrt(0.95 * 0.05 / len(found))
    claims = np.mean([one.p <= FALSE_DISCOVERY_RATE for one in found])
    assert claims <= FALSE_DISCOVERY_RATE + 3 * np.sqrt(FALSE_DISCOVERY_RATE / len(found))


@pytest.mark.parametrize("distribution", NOISES)
def test_a_gain_of_10_percent_is_shown_in_most_runs(distribution):
    found = list(estimates(distribution, 1e9, gain=GAIN))
    assert np.mean([one.p <= FALSE_DISCOVERY_RATE for one in found]) >= 0.7
