"""Formulas against worked values, and the fit against models it must find again."""

import pytest

from labkit.costs.communication import (
    ALL_GATHER_COSTS,
    REDUCE_SCATTER_COSTS,
    AlphaBeta,
    MessageCost,
    best_buckets,
    bucket_overhead,
    bus_bandwidth,
    butterfly,
    crossover_bytes,
    fit_alpha_beta,
    halving_doubling,
    one_shot,
    recursive_doubling,
    ring,
)

ALL_REDUCES = (ring, butterfly, one_shot, recursive_doubling, halving_doubling)
ALL_COSTS = ({cost.__name__: cost for cost in ALL_REDUCES}, REDUCE_SCATTER_COSTS, ALL_GATHER_COSTS)


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_an_all_reduce_costs_what_its_two_phases_do(world_size):
    for cost in (ring, butterfly, halving_doubling):
        phases = (costs[cost.__name__](world_size, 1000) for costs in (REDUCE_SCATTER_COSTS, ALL_GATHER_COSTS))
        assert cost(world_size, 1000) == sum(phases, MessageCost(0, 0))


@pytest.mark.parametrize(
    ("cost", "world_size", "messages", "n_bytes"),
    [
        (ring, 4, 6, 1500),
        (butterfly, 4, 2, 1500),
        (one_shot, 4, 1, 3000),
        (recursive_doubling, 4, 2, 2000),
        (halving_doubling, 4, 4, 1500),
        (recursive_doubling, 5, 4, 4000),  # as 4 ranks, and 1000 bytes folded in and out
        (halving_doubling, 6, 6, 3500),
        (ALL_GATHER_COSTS["one_shot"], 4, 1, 750),  # a shard to everybody
        (REDUCE_SCATTER_COSTS["one_shot"], 4, 1, 3000),  # everything to everybody
        # two rounds of at most 2 + 1 and 2 shards of 200 bytes; 1000 folded in and 200 out
        (REDUCE_SCATTER_COSTS["halving_doubling"], 5, 4, 2 * 200 + 3 * 200 + 1200),
        *[(cost, 1, 0, 0) for costs in ALL_COSTS for cost in costs.values()],
    ],
)
def test_costs_of_a_thousand_bytes(cost, world_size, messages, n_bytes):
    assert cost(world_size, 1000) == MessageCost(messages, n_bytes)


def test_bus_bandwidth_counts_what_a_link_carries():
    assert bus_bandwidth(4, 1e9, 1.0) == 1.5e9


def test_the_fit_finds_a_model_again():
    model = AlphaBeta(1e-4, 5e-10)
    costs = [cost(4, n) for cost in ALL_REDUCES for n in (1e3, 1e5, 1e8)]
    fitted = fit_alpha_beta(costs, [model.predict_s(cost) for cost in costs])
    assert fitted.alpha_s == pytest.approx(1e-4)
    assert fitted.beta_s_per_byte == pytest.approx(5e-10)
    assert fitted.largest_error == pytest.approx(0, abs=1e-9)


def test_the_fit_weighs_small_messages_as_much_as_large_ones():
    costs = [MessageCost(1, n) for n in (1e3, 1e4, 1e8)]
    times = [1e-4, 1e-4, 0.06]
    assert fit_alpha_beta(costs, times).alpha_s == pytest.approx(1e-4, rel=0.05)


def test_the_fit_does_not_go_below_zero():
    fitted = fit_alpha_beta([MessageCost(1, n) for n in (1e3, 1e6)], [1e-3, 1e-4])
    assert fitted.beta_s_per_byte == 0
    assert fitted.alpha_s > 0


@pytest.mark.parametrize("times", [[1.0], [1.0, 0.0], [1.0, -1.0]])
def test_the_fit_refuses_what_it_cannot_use(times):
    with pytest.raises(ValueError, match="two or more positive times"):
        fit_alpha_beta([MessageCost(1, 1)] * len(times), times)


def test_crossover_is_where_predicted_times_are_equal():
    model = AlphaBeta(1e-4, 1e-9)
    n = crossover_bytes(recursive_doubling, ring, 4, model)
    times = [model.predict_s(cost(4, n)) for cost in (recursive_doubling, ring)]
    assert times[0] == pytest.approx(times[1])


def test_no_crossover_where_the_second_never_wins():
    model = AlphaBeta(1e-4, 1e-9)
    assert crossover_bytes(ring, recursive_doubling, 4, model) is None
    assert crossover_bytes(recursive_doubling, ring, 2, model) is None  # both send n bytes; one message fewer


def test_the_best_number_of_buckets_is_where_the_overhead_is_smallest():
    model = AlphaBeta(1e-4, 1e-10)  # s/(ow) = 1e9 bytes * 1e-10 / 1e-4
    best = best_buckets(1e9, model)
    assert best == pytest.approx(1000**0.5)
    at_best = model.predict_s(bucket_overhead(best, 1e9))
    assert at_best == pytest.approx(2 * (1e9 * 1e-4 * 1e-10) ** 0.5)
    assert all(model.predict_s(bucket_overhead(best * factor, 1e9)) > at_best for factor in (0.9, 1.1))


def test_buckets_are_never_fewer_than_one_and_free_calls_allow_any_number():
    assert best_buckets(1000, AlphaBeta(1.0, 1e-9)) == 1
    assert best_buckets(1000, AlphaBeta(0.0, 1e-9)) == float("inf")
    with pytest.raises(ValueError, match="one bucket or more, got 0"):
        bucket_overhead(0, 1000)
