"""The operators of a step are the same wherever they are counted, and the optimizer is that of the device."""

from collections import Counter
from dataclasses import replace

import pytest
from labkit.studies.end_to_end.tables import PREDICTED

from labkit.costs.transformer import SIZES
from labkit.studies.shared import step_operators as module
from labkit.studies.shared.step_operators import OPTIMIZER, step_operators
from tests.calibrated import made_up


def test_a_step_on_a_gpu_is_predicted_without_one():
    on_cpu, on_gpu = (step_operators(SIZES["nano"], 2, 16, "bfloat16", device)[OPTIMIZER] for device in ("cpu", "cuda"))
    assert any(one.name.startswith("_foreach") for one in on_gpu)
    assert not any(one.name.startswith("_foreach") for one in on_cpu)
    (rates, *_) = made_up().rates
    calibration = replace(made_up(), rates=(replace(rates, device="cuda"),))
    row = dict.fromkeys(PREDICTED.columns, "") | {"device": "cuda", "precision": "float32", "size": "nano"}
    row |= {"batch": 2, "context_length": 16, "phase": "forward"}
    assert PREDICTED.seconds(row, calibration) > 0


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_layers_that_are_not_traced_are_counted(precision):
    shape = replace(SIZES["nano"], n_layers=4)
    whole = {**module._traced_passes(shape, 2, 16, precision), **module._traced_update(shape, "cpu")}
    found = step_operators(shape, 2, 16, precision)
    assert {phase: Counter(calls) for phase, calls in found.items()} == {
        phase: Counter(calls) for phase, calls in whole.items()
    }
