"""Parameters: refused with a message that names the parameter and what was meant."""

from typing import Annotated

import pytest
from IPython.core.interactiveshell import InteractiveShell
from pydantic import Field

from labkit.lab.config import LabConfig, ParameterError, parse_assignments, resolve_config
from labkit.lab.runs.store import RunFileError
from labkit.machine.description import describe_machine
from labkit.studies import load_lab


class _Config(LabConfig):
    world_sizes: list[Annotated[int, Field(ge=1)]] = [2]
    lr: float = 0.1
    name: str = "x"


PROFILES = {"smoke": _Config(), "quick": _Config(world_sizes=[2, 4])}


def _resolve(profile="quick", **overrides):
    return resolve_config("a_lab", PROFILES, profile, overrides)


def test_overrides_replace_what_the_profile_says_and_none_leaves_it():
    assert _resolve(lr=0.5, name=None) == _Config(world_sizes=[2, 4], lr=0.5)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"wrold_sizes": [2]}, ["a_lab", "'wrold_sizes'", "did you mean 'world_sizes'"]),
        (
            {"world_sizes": "[2, 4]"},
            ["'world_sizes'", "should be a valid list", "'[2, 4]'", "; quick has world_sizes=["],
        ),
        ({"world_sizes": [2, -4]}, ["'world_sizes' (item 1)", "greater than or equal to 1", "-4"]),
        ({"world_sizes": [2.5]}, ["'world_sizes'", "integer", "2.5"]),
        ({"lr": "1e-3"}, ["'lr'", "valid number", "'1e-3'"]),
        ({"name": 3}, ["'name'", "valid string", "3"]),
    ],
)
def test_bad_parameters_are_named_with_what_was_expected(overrides, words):
    with pytest.raises(ParameterError) as caught:
        _resolve(**overrides)
    assert all(word in str(caught.value) for word in words)
    assert "\n" not in str(caught.value)


def test_an_unknown_profile_is_named_with_the_nearest():
    with pytest.raises(ParameterError, match=r"'quik' \(did you mean 'quick'\?\)"):
        _resolve("quik")


def test_assignments_are_json_python_or_text():
    given = [
        "sizes=[1, 2]",
        "flag=True",
        "other=false",
        "rate=1e-3",
        "name=bfloat16",
        "nothing=null",
        "equal=a=b",
    ]
    assert parse_assignments(given) == {
        "sizes": [1, 2],
        "flag": True,
        "other": False,
        "rate": 1e-3,
        "name": "bfloat16",
        "nothing": None,
        "equal": "a=b",
    }


def test_a_list_without_transports_measures_none():
    study = load_lab("all_reduce")
    config = study.configure("smoke", {"transports": []})
    points = study.plan(config, describe_machine())
    assert "transports" not in {point.sweep for point in points}


@pytest.mark.parametrize("text", ["sizes", "=3", ""])
def test_what_is_no_assignment_is_refused(text):
    with pytest.raises(ParameterError, match="name=value"):
        parse_assignments([text])


@pytest.mark.parametrize("kind", [ParameterError, RunFileError])
def test_a_notebook_shows_a_mistake_in_one_line(kind, capsys):
    shell = InteractiveShell()
    shell.user_ns["mistake"] = kind("ranks: expected a list, got 'x'")
    shell.run_cell("def refuse():\n    raise mistake\n\n\nrefuse()")
    assert capsys.readouterr().out == f"{kind.__name__}: ranks: expected a list, got 'x'\n"
