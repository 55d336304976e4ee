"""When rounds end: by the width of intervals and by the clock, alike on all ranks; and what
coverage that leaves."""

import numpy as np
import pytest
import torch.distributed as dist

from labkit.bench import clock
from labkit.bench.clock import MIN_ROUNDS, Stopping, time_interleaved
from labkit.bench.intervals import estimate_paired
from labkit.parallel.launch import run_ranks

MOST = 60


def _rounds(times, *, most=MOST, ratio_within=0.05, rounds_s=1e9):
    """How many of these rounds are taken: `times`, (alternatives, rounds)."""
    rule = Stopping(ratio_within, rounds_s)
    for n in range(1, most):
        if rule.is_enough({str(name): {"all": list(one[:n])} for name, one in enumerate(times)}):
            return n
    return most


def _noise(spread, seed=0, names=2):
    return np.exp(np.random.default_rng(seed).normal(0, spread, (names, MOST)))


def test_steady_alternatives_need_few_rounds_and_noisy_ones_more():
    taken = [_rounds(_noise(spread)) for spread in (0.001, 0.05, 0.1, 0.5)]
    assert taken == sorted(taken)
    assert taken[0] == MIN_ROUNDS
    assert taken[-1] == MOST
    assert taken[1] < taken[-1]


def test_the_noisiest_of_all_alternatives_decides_and_each_part_counts():
    steady = _noise(0.001)
    noisy = _noise(0.5)
    assert _rounds(np.concatenate([steady, noisy[:1]])) == MOST
    rule = Stopping(0.05, 1e9)
    parts = {
        "a": {"forward": steady[0, :20], "backward": noisy[0, :20]},
        "b": {"forward": steady[1, :20]},
    }
    assert not rule.is_enough(parts)
    assert Stopping(0.05, 1e9).is_enough(
        {name: {"forward": of["forward"]} for name, of in parts.items()}
    )


@pytest.mark.parametrize("seed", range(5))
def test_where_the_ratio_lies_has_no_part_in_it(seed):
    times = _noise(0.08, seed)
    assert _rounds(times) == _rounds(times * [[1.0], [3.0]]) == _rounds(times[::-1])


def test_time_ends_rounds_once_there_is_an_interval(monkeypatch):
    now = iter(range(10**6))
    monkeypatch.setattr(clock.time, "perf_counter", lambda: next(now))
    assert _rounds(_noise(0.5), rounds_s=0.5) == 6
    assert _rounds(_noise(0.5), rounds_s=3.5, ratio_within=0.0) == 13  # looks at 6, 8, 10, 13
    assert _rounds(_noise(0.0), ratio_within=0.0, rounds_s=float("inf")) == MOST


def _until_narrow():
    rank = dist.get_rank()
    # what the steady rank waits for
    slower = np.maximum(1.0, _noise(0.5, seed=3)) if rank else np.ones((2, MOST))
    times = iter(slower.ravel())
    clock._time_calls = lambda action, calls, is_cuda: next(times)  # of this rank's process alone
    samples = time_interleaved({"a": int, "b": int}, warmup=0, repeats=30, ratio_within=0.1)
    dist.barrier()
    return len(samples["a"])


def test_ranks_take_as_many_rounds_as_the_slowest_of_them_need():
    first, second = run_ranks(_until_narrow, world_size=2)
    assert first == second > MIN_ROUNDS


NOISES = {
    "log-normal, 5 %": lambda rng, shape: rng.normal(0, 0.05, shape),
    "log-normal, 10 %": lambda rng, shape: rng.normal(0, 0.1, shape),
    "t2": lambda rng, shape: 0.05 * rng.standard_t(2, shape),
    "outliers": lambda rng, shape: rng.normal(0, 0.04, shape) + 0.5 * (rng.random(shape) < 0.1),
}


@pytest.mark.parametrize("noise", NOISES)
def test_intervals_hold_what_they_promise_where_their_width_decided_when_to_stop(noise):
    tries = 300
    rng = np.random.default_rng(7)
    inside = 0
    rounds = []
    for _ in range(tries):
        times = np.exp(NOISES[noise](rng, (2, MOST)))
        rounds.append(_rounds(times, ratio_within=0.06))
        found = estimate_paired(np.log(times[0, : rounds[-1]] / times[1, : rounds[-1]]))
        inside += found.low <= 0 <= found.high
    assert MIN_ROUNDS < np.mean(rounds) < MOST  # else nothing has been shown
    assert inside / tries >= 0.95 - 3 * np.sqrt(0.95 * 0.05 / tries)
