"""A made-up machine: what it takes is read off its curves, and between ranks off what was
measured."""

import math
from dataclasses import replace

import pytest
from pydantic import TypeAdapter

from labkit.costs.calibration import MESSAGE, Autograd, Calibration
from labkit.costs.communication import MessageCost
from tests.calibrated import BYTES_PER_S, CALL_S, FLOPS_PER_S, made_up


def test_an_operator_takes_its_call_its_arithmetic_or_its_memory():
    rates = made_up().rates_on("cpu")
    assert rates.operator_s(0, 4) == pytest.approx(CALL_S, rel=0.02)
    assert rates.operator_s(0, 1e9) == pytest.approx(1e9 / BYTES_PER_S, rel=0.02)
    assert rates.operator_s(1e10, 1e6) == pytest.approx(1e10 / FLOPS_PER_S, rel=0.02)
    assert rates.operator_s(1e6, 1e8) == pytest.approx(1e8 / BYTES_PER_S, rel=0.02)
    # its products were not measured: no prediction
    assert math.isnan(rates.operator_s(1e10, 1e6, "float16"))
    assert rates.operator_s(0, 1e9, "float16") == rates.operator_s(0, 1e9)
    assert made_up().rates_on("cuda") is None


def test_operators_under_autograd_cost_more_than_calls_in_a_row():
    plain = made_up().rates_on("cpu")
    assert plain.autograd_s(100) == 0  # an older run
    rates = replace(plain, autograd=Autograd(begin_s=5e-5, operator_s=3e-6))
    call_s = rates.operator_s(0, 1)
    assert rates.autograd_s(100) == pytest.approx(5e-5 + 100 * (3e-6 - call_s))
    assert rates.autograd_s(100, begin=False) == pytest.approx(100 * (3e-6 - call_s))


def test_a_transport_costs_its_call_its_messages_and_its_bytes():
    two = made_up().transport("gloo", MESSAGE, 2)
    assert two.predict_s(MessageCost(3, 1e6)) == pytest.approx(3e-4 + 1e-3)
    assert (
        made_up().transport("pigeons", MESSAGE, 2)
        is made_up().transport("gloo", MESSAGE, 3)
        is None
    )


def test_the_calibration_survives_its_file():
    adapter = TypeAdapter(Calibration)
    assert adapter.validate_json(adapter.dump_json(made_up())) == made_up()
