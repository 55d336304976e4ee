"""A user's own alternatives: which are refused, and that they are registered only while
measured."""

from dataclasses import replace

import pytest

from labkit.lab.config import ParameterError
from labkit.lab.user_worker import Plugins, registered
from labkit.machine.description import describe_machine
from labkit.studies import LABS, load_lab
from tests.lab.fake_lab import FAKE

PLUGGED = replace(FAKE, plugin_parameter="names")


@pytest.mark.parametrize(
    ("study", "given", "expected"),
    [
        (FAKE, {"mine": print}, "no place for alternatives"),
        (PLUGGED, {"my own": print}, "letters, digits and _"),
        (PLUGGED, {"mine": 3}, "expected a function, got 3"),
        (PLUGGED, print, "expected alternatives by name, as {'mine': mine}, got <built-in"),
    ],
)
def test_what_is_no_alternative_is_refused_before_anything_runs(study, given, expected):
    with pytest.raises(ParameterError, match=expected):
        study.check_plugins(Plugins(given))


@pytest.mark.parametrize("lab", [lab for lab in LABS if load_lab(lab).plugin_parameter])
def test_a_users_own_is_registered_only_while_it_is_measured(lab):
    declared = load_lab(lab)
    plugins = Plugins({"mine": print})
    with pytest.raises(KeyboardInterrupt), registered(declared.register, plugins):
        raise KeyboardInterrupt
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
    work = declared.worker_with(plugins)
    assert list(work(None)) == [{"has_mine": True}]
    assert not table


@pytest.mark.parametrize("lab", [lab for lab in LABS if load_lab(lab).plugin_parameter is not None])
def test_only_a_reader_s_alternative_is_planned_with_its_baseline_and_with_the_models_of_the_lab(
    lab,
):
    study = load_lab(lab)
    plugins = Plugins({"mine": print})
    with registered(study.register, plugins):
        config = study.with_plugins(study.profiles["smoke"], plugins, only=True)
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
