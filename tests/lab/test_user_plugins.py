"""A user's own models and alternatives: which are refused, and that they are registered only while
measured."""

from dataclasses import replace

import pandas as pd
import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from labkit.costs.transformer import SIZES, TransformerShape, n_parameters
from labkit.lab.config import ParameterError
from labkit.lab.user_models import (
    ModelError,
    count_parameters,
    describe_model,
    errors_with_line,
    find_shape,
    model_names,
    model_source,
    recorded_shapes,
    registered_models,
)
from labkit.lab.user_plugins import check_plugins, with_plugin_names, worker_with_plugins
from labkit.lab.user_worker import Plugins, registered
from labkit.machine.description import describe_machine
from labkit.nn.training import TrainingStep, build_workload
from labkit.studies import LABS, load_lab
from tests.lab.fake_lab import FAKE

SHAPE = TransformerShape(d_model=8, d_ff=16, n_layers=1, n_heads=2, vocabulary=10)


def tied():
    """Two layers with one weight, a frozen bias and dropout."""
    first = nn.Linear(4, 4)
    second = nn.Linear(4, 4)
    second.weight = first.weight
    first.bias.requires_grad_(False)
    return (
        nn.Sequential(first, nn.Dropout(0.5), second),
        torch.randn(8, 4),
        torch.randn(8, 4),
        mse_loss,
    )


def _user_models():
    return tuple(name for name in model_names() if name not in SIZES)


HELD = tied()[0]  # as a model that a cell has made before


@pytest.fixture
def models():
    own = {
        "tied": tied,
        "needs_numbers": needs_numbers,
        "held": lambda: (HELD, torch.ones(2, 4), torch.ones(2, 4), mse_loss),
        "shape": SHAPE,
    }
    with registered_models(own):
        yield own


def needs_numbers():
    """What the meta device has none of."""
    return nn.Linear(int(torch.full((), 3.0)), 1), torch.ones(2, 3), torch.ones(2, 1), mse_loss


def test_models_are_made_anew_with_the_same_parameters_and_other_batches(models):
    rank0, rank1 = (build_workload(model_source("tied"), batch=1, seed=seed) for seed in (0, 1))
    one = rank0.build()
    other = rank1.build()
    assert torch.equal(one[0].weight, other[0].weight)
    assert one[0].weight is one[2].weight is not other[0].weight
    assert [parameter.requires_grad for parameter in one.parameters()] == [True, False, True]
    # dropout leaves out the same
    assert rank0.loss(one).item() == rank0.loss(other).item() != rank1.loss(one).item()


def test_a_model_that_was_there_before_is_copied(models):
    step = TrainingStep(model_source("held"), batch=0, context_length=0)
    step.run()
    assert step.model[0].weight is not HELD[0].weight
    assert all(parameter.grad is None for parameter in HELD.parameters())


def test_what_is_known_of_a_model_stands_in_its_rows(models):
    assert count_parameters("tied") == 4 * 4 + 4 + 4
    assert count_parameters("shape") == n_parameters(SHAPE)
    assert count_parameters("needs_numbers") is None
    assert describe_model("nano") == {}
    frame = pd.DataFrame(
        [{"size": name, **describe_model(name)} for name in ("needs_numbers", "shape", "nano")]
    )
    with registered_models(dict.fromkeys(_user_models(), print)), recorded_shapes(frame):
        assert (find_shape("shape"), find_shape("needs_numbers")) == (SHAPE, None)
    with recorded_shapes(pd.DataFrame()):
        assert _user_models() == tuple(models)


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (lambda: nn.Linear(2, 2), r"expected \(model, inputs, targets, loss\), got Linear"),
        (lambda: (1, 2, 3, 4), "expected the model to be an nn.Module, got int"),
        (lambda: (nn.ReLU(), 1, 1, mse_loss), "expected a model with parameters"),
        (
            lambda: (nn.Linear(1, 1), torch.ones(3, 1), 1, None),
            "expected the loss to be a function",
        ),
        (
            lambda: (nn.Linear(1, 1), torch.ones(3, 1), 1, lambda y, _: y),
            r"one number, got a tensor of shape \(3, 1\)",
        ),
        (
            lambda: (nn.Linear(1, 1), torch.ones(3, 1), 1, lambda y, _: y.detach().sum()),
            "a loss with a gradient",
        ),
        (lambda: (nn.Linear(1, 1), torch.ones(3, 2), 1, mse_loss), "cannot be multiplied .*line"),
        (lambda: (nn.Linear(1, 1), 1 / 0), "ZeroDivisionError.*, line"),
    ],
)
def test_a_mistake_is_told_with_its_line(made, expected):
    told = pytest.raises(ModelError, match=rf"{expected}.* of test_user_plugins.py")
    with registered_models({"mine": made}), told, errors_with_line("mine"):
        TrainingStep(model_source("mine"), batch=0, context_length=0).run()


MODELS = replace(FAKE, model_parameters=("sizes",), takes_models=True)


@pytest.mark.parametrize(
    ("study", "given", "expected"),
    [
        (FAKE, {"mine": tied}, "no place for models"),
        (MODELS, {"nano": tied}, "expected a name other than"),
        (MODELS, {"my model": tied}, "letters, digits and _"),
        (MODELS, {"mine": nn.Linear(1, 1)}, "a function that returns"),
        (MODELS, {"mine": 3}, "expected a TransformerShape, or a function"),
        (MODELS, tied, "expected models by name, as {'mine': mine}, got <function tied"),
    ],
)
def test_what_is_no_model_is_refused_before_anything_runs(study, given, expected):
    with pytest.raises(ParameterError, match=expected):
        check_plugins(study, Plugins(models=given))


@pytest.mark.parametrize(
    "lab", [lab for lab in LABS if load_lab(lab).plugin_parameter or load_lab(lab).takes_models]
)
def test_a_users_own_is_registered_only_while_it_is_measured(lab):
    declared = load_lab(lab)
    alternatives = {"mine": print} if declared.plugin_parameter else {}
    models = {"its_model": SHAPE} if declared.takes_models else {}
    plugins = Plugins(alternatives, models)

    def interrupt():
        assert _user_models() == tuple(models)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), registered(declared.register, plugins):
        interrupt()
    assert _user_models() == ()
    assert model_names() == tuple(SIZES)
    with registered(declared.register, plugins):  # its name is free again
        pass


def test_a_rank_registers_a_users_own_for_the_time_of_a_point():
    table = {}

    def register(name, alternative):
        table[name] = alternative
        return table

    declared = replace(
        FAKE, register=register, worker=lambda point: [{"has_mine": "mine" in table}]
    )
    plugins = Plugins({"mine": print})
    work = worker_with_plugins(declared, plugins)
    assert list(work(None)) == [{"has_mine": True}]
    assert not table


@pytest.mark.parametrize("lab", [lab for lab in LABS if load_lab(lab).plugin_parameter is not None])
def test_only_a_reader_s_alternative_is_planned_with_its_baseline_and_with_the_models_of_the_lab(
    lab,
):
    study = load_lab(lab)
    plugins = Plugins({"mine": print})
    with registered(study.register, plugins):
        config = with_plugin_names(study, study.profiles["smoke"], plugins, only=True)
        points = [
            point for point in study.plan(config, describe_machine()) if point.mentions({"mine"})
        ]
    assert points
    assert all(getattr(config, place) for place in study.model_parameters)
    for point in points:
        (names,) = [
            value
            for value in point.describe().values()
            if isinstance(value, list) and "mine" in value
        ]
        assert 2 <= len(names) < 5
