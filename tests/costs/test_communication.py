"""Formulas against worked values, and the fit against models it must find again."""

import pytest

from labkit.costs import communication as c
from labkit.costs.communication import ALL_REDUCES, MessageCost, fit_alpha_beta


@pytest.mark.parametrize(
    ("cost", "world_size", "messages", "n_bytes"),
    [
        (c.ring, 4, 6, 1500),
        (c.butterfly, 4, 2, 1500),
        (c.one_shot, 4, 1, 3000),
        (c.recursive_doubling, 4, 2, 2000),
        (c.halving_doubling, 4, 4, 1500),
        (c.recursive_doubling, 5, 4, 4000),  # as 4 ranks, and 1000 bytes folded in and out
        (c.halving_doubling, 6, 6, 3500),
        *[(cost, 1, 0, 0) for cost in ALL_REDUCES],
    ],
)
def test_costs_of_a_thousand_bytes(cost, world_size, messages, n_bytes):
    assert cost(world_size, 1000) == MessageCost(messages, n_bytes)


def test_bus_bandwidth_counts_what_a_link_carries():
    assert c.bus_bandwidth(4, 1e9, 1.0) == 1.5e9


def test_the_fit_finds_a_model_again_and_weighs_small_messages_as_much_as_large_ones():
    costs = [cost(4, n) for cost in ALL_REDUCES for n in (1e3, 1e5, 1e8)]
    seconds = [1e-4 * cost.messages + 1e-9 * cost.n_bytes for cost in costs]
    assert fit_alpha_beta(costs, seconds) == pytest.approx((1e-4, 1e-9))
    costs = [MessageCost(1, n) for n in (1e3, 1e4, 1e8)]
    assert fit_alpha_beta(costs, [1e-4, 1e-4, 0.06])[0] == pytest.approx(1e-4, rel=0.05)


def test_the_fit_does_not_go_below_zero_and_refuses_what_it_cannot_use():
    alpha_s, beta_s_per_byte = fit_alpha_beta([MessageCost(1, n) for n in (1e3, 1e6)], [1e-3, 1e-4])
    assert beta_s_per_byte == 0 < alpha_s
    for times in ([1.0], [1.0, 0.0], [1.0, -1.0]):
        with pytest.raises(ValueError, match="two or more positive times"):
            fit_alpha_beta([MessageCost(1, 1)] * len(times), times)
