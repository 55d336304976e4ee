"""A made-up machine: more ranks than cores share them."""

import pytest
from pydantic import TypeAdapter

from labkit.costs.calibration import ALL_REDUCE, MESSAGE, Calibration
from labkit.costs.communication import MessageCost
from tests.calibrated import made_up


def test_a_transport_costs_its_call_its_messages_and_its_bytes():
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
