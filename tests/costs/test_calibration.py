"""A made-up machine: what it takes is read off its curves, and more ranks than cores share them."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
from pydantic import TypeAdapter

from labkit.costs.calibration import ALL_REDUCE, MESSAGE, Autograd, Calibration
from labkit.costs.communication import MessageCost
from tests.calibrated import BYTES_PER_S, CALL_S, FLOPS_PER_S, made_up


def _operator(flops, n_bytes, dtype="float32"):
    return SimpleNamespace(flops=flops, n_bytes=n_bytes, dtype=dtype)


def test_an_operator_takes_its_call_its_arithmetic_or_its_memory():
    rates = made_up().of_ranks()
    assert rates.operator_s(0, 4) == pytest.approx(CALL_S, rel=0.02)
    assert rates.operator_s(0, 1e9) == pytest.approx(1e9 / BYTES_PER_S, rel=0.02)
    assert rates.operator_s(1e10, 1e6) == pytest.approx(1e10 / FLOPS_PER_S, rel=0.02)
    assert rates.operator_s(1e6, 1e8) == pytest.approx(1e8 / BYTES_PER_S, rel=0.02)
    assert math.isnan(rates.operator_s(1e10, 1e6, "float16"))  # its products were not measured: no prediction
    assert rates.operator_s(0, 1e9, "float16") == rates.operator_s(0, 1e9)
    three = [_operator(0, 1e9), _operator(1e10, 1), _operator(0, 4)]
    assert made_up().operators_s(three) == pytest.approx(0.2, rel=0.02)


def test_ranks_beyond_the_cores_share_them():
    machine = made_up()
    assert machine.operators_s([_operator(1e10, 1)], ranks=2) == pytest.approx(0.2, rel=0.02)
    assert machine.operators_s([_operator(1e10, 1)], ranks=4) == pytest.approx(0.4, rel=0.02)
    # one rank computed with all eight threads; each of four has two
    assert made_up(cores=8, ranks=(1,)).operators_s([_operator(1e10, 1)], ranks=4) == pytest.approx(0.4, rel=0.02)
    with pytest.raises(ValueError, match="expected a device"):
        machine.of_ranks(1, "cuda")


def test_operators_under_autograd_cost_more_than_calls_in_a_row():
    plain = made_up().of_ranks()
    assert plain.under_autograd_s(100) == 0  # an older run
    rates = replace(plain, autograd=Autograd(begin_s=5e-5, operator_s=3e-6))
    assert rates.under_autograd_s(100) == pytest.approx(5e-5 + 100 * (3e-6 - rates.call_s))
    assert rates.under_autograd_s(100, begin=False) == pytest.approx(100 * (3e-6 - rates.call_s))
    machine = replace(made_up(), rates=(rates,))
    assert machine.of_ranks(4).under_autograd_s(100) == pytest.approx(4 * rates.under_autograd_s(100))
    more = replace(machine, rates=(rates, replace(plain, ranks=4)))
    assert more.of_ranks(4).autograd == rates.autograd  # measured of fewer ranks only
    adapter = TypeAdapter(Calibration)
    assert adapter.validate_json(adapter.dump_json(machine)) == machine


def test_a_way_costs_its_call_its_messages_and_its_bytes():
    machine = made_up()
    two, eight = (machine.transport("gloo", MESSAGE, ranks) for ranks in (2, 8))
    assert two.predict_s(MessageCost(3, 1e6)) == pytest.approx(3e-4 + 1e-3)
    assert eight.predict_s(MessageCost(3, 1e6)) == pytest.approx(4 * two.predict_s(MessageCost(3, 1e6)))
    assert machine.transport("pigeons", ALL_REDUCE, 2) is None


def test_more_ranks_have_more_messages_and_hardly_more_bytes_in_an_all_reduce():
    two, eight = (made_up(cores=8).transport("gloo", ALL_REDUCE, ranks) for ranks in (2, 8))
    assert eight.alpha_s == pytest.approx(7 * two.alpha_s)
    assert eight.beta_s_per_byte == pytest.approx(7 / 8 * 2 * two.beta_s_per_byte)


def test_the_calibration_survives_its_file():
    adapter = TypeAdapter(Calibration)
    assert adapter.validate_json(adapter.dump_json(made_up())) == made_up()
