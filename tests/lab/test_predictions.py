"""Before measuring: what is expected, a reader's guess beside it; afterwards what it took."""

import ast
import re
from dataclasses import replace

import pandas as pd
import pytest

from labkit.lab.as_predicted import CLOSE
from labkit.lab.columns import labels
from labkit.lab.config import ParameterError
from labkit.lab.notebook import Lab, check_parameters
from labkit.lab.predictions import Predicted, named, to_show
from labkit.lab.rows import Measured
from labkit.machine import describe_machine
from labkit.studies import LABS, load_lab
from tests.calibrated import CALL_S, made_up
from tests.lab.fake_study import FakeStudy
from tests.rehearsal.pages import cells_of

TIMES = Measured(("action",), "size")


class _Predicting(FakeStudy):
    name = "fake"
    predicted = Predicted(
        ("action", "size"),
        lambda row, calibration: None if row["action"] == "unknown" else row["size"] * calibration.of_ranks().call_s,
        lambda point: [{"action": point.action, "size": point.size}],
        TIMES.medians,
    )


@pytest.fixture
def lab(monkeypatch):
    """A lab on the made-up machine; `shown` are the tables it displays."""
    monkeypatch.setattr("labkit.lab.notebook.newest_calibration", lambda machine: made_up())
    study = _Predicting()
    given = {"profile": "smoke", "actions": ["fine", "raise", "unknown"], "world_size": 1}
    opened = Lab(study, check_parameters(study, given))
    monkeypatch.setattr(opened, "table", lambda frame, caption="": shown.append((frame, caption)))
    shown: list[tuple[pd.DataFrame, str]] = []
    opened.shown = shown
    return opened


def _measured(*times):
    rows = [
        {"action": action, "size": 1, "repeat": i, "rank": 0, "seconds": s} for action, s in times for i in range(6)
    ]
    return pd.DataFrame(rows)


def test_one_formula_serves_before_and_after():
    study, machine = _Predicting(), made_up()
    points = study.points(study.profiles["smoke"].model_copy(update={"actions": ["fine", "unknown"]}), None)
    before = study.predicted.before(points, machine)
    assert before["predicted_s"].tolist() == pytest.approx([CALL_S], rel=0.02)
    after = study.predicted.beside(_measured(("fine", 2 * CALL_S), ("unknown", 1.0)), machine)
    assert after["measured_over_predicted"].tolist() == pytest.approx([2.0], rel=0.02)
    assert study.predicted.beside(_measured(("fine", 1.0)), None).empty
    assert study.predicted.beside(pd.DataFrame(), machine).empty


@pytest.mark.parametrize(("factor", "explains"), [(0.5, False), (1.4, False), (1.6, True)])
def test_what_a_formula_leaves_out_is_named_where_it_shows(factor, explains):
    predicted = replace(_Predicting.predicted, leaves_out="What it does not know.")
    expected_s = _Predicting.predicted.seconds({"action": "fine", "size": 1}, made_up())
    told = predicted.told(predicted.beside(_measured(("fine", factor * expected_s)), made_up()))
    assert f"{factor} times" in told
    assert (predicted.leaves_out in told) == explains
    assert ("at once" in told) == (factor < 1 / CLOSE)
    assert predicted.told(predicted.beside(_measured(("fine", 1.0)), None)) == ""


def test_the_readers_guess_stands_beside_the_prediction_and_the_measurement(lab):
    lab.predict({"fine, size 1": 0.5})
    table, caption = lab.shown[0]
    assert "made up" in caption
    assert table.columns.tolist() == ["what", "your_guess_s", "predicted_s"]
    assert table.set_index("what")["your_guess_s"].to_dict()["fine, size 1"] == 0.5
    lab._show_expected(lab.study.predicted.beside(_measured(("fine", 0.1), ("raise", 0.1)), made_up()), "after")
    assert lab.shown[1][0].columns.tolist()[-2:] == ["seconds", "measured_over_predicted"]
    with pytest.raises(ParameterError, match="nothing is called 'fine, size 2'; did you mean 'fine, size 1'"):
        lab.predict({"fine, size 2": 1})
    with pytest.raises(ParameterError, match="expected seconds above zero"):
        lab.predict({"fine, size 1": -1})


def test_without_a_calibration_it_says_how_to_get_one_and_goes_on(lab, monkeypatch, capsys):
    monkeypatch.setattr("labkit.lab.notebook.newest_calibration", lambda machine: None)
    lab.predict()
    assert not lab.shown
    assert "labkit measure limits" in capsys.readouterr().out


def test_many_rows_are_thinned_but_guessed_ones_stay():
    names = [f"{n}" for n in range(100)]
    shown = to_show(names, {"33": 1.0})
    assert len(shown) <= 11
    assert {"0", "33", "99"} <= set(shown)


def test_a_name_has_what_always_names_a_row_and_what_tells_rows_apart():
    columns = ("sweep", "world_size", "model", "buckets", "phase")
    predicted = Predicted(columns, lambda *_: None, lambda _: [], lambda frame: frame, names=("model",))
    rows = [("a", 2, "nano", 1, "forward"), ("b", 2, "nano", 6, "forward")]
    table = pd.DataFrame(rows, columns=columns)
    assert labels(table, predicted.naming(table)) == ["nano, 1 bucket", "nano, 6 buckets"]
    assert labels(table[:1], predicted.naming(table[:1])) == ["nano"]
    assert labels(table[:1], columns[1:4]) == ["2 ranks, nano, 1 bucket"]


def test_a_guess_may_name_a_part_of_what_one_row_alone_has():
    names = ["float32, nano, step", "float32, nano, backward", "bfloat16, nano, step"]
    assert named({"nano, backward": 1, "bfloat16": 2}, names) == {names[1]: 1, names[2]: 2}
    with pytest.raises(ParameterError, match="may be 'float32, nano, step' or 'bfloat16, nano, step'"):
        named({"nano, step": 1}, names)
    with pytest.raises(ParameterError, match=r"expected \{name: seconds\}, got 0\.5"):
        named(0.5, names)
    with pytest.raises(ParameterError, match="guessed twice"):
        named({"nano, backward": 1, "backward": 2}, names)
    with pytest.raises(ParameterError, match="nothing is called 'nano'"):
        named({"nano": 1}, [])


@pytest.mark.parametrize("profile", ["smoke", "quick"])
@pytest.mark.parametrize("lab", [lab for lab in LABS if load_lab(lab).predicted])
def test_what_a_notebook_guesses_has_its_name_whatever_the_profile(lab, profile):
    study = load_lab(lab)
    # what has a formula here, without tracing any model
    by_name = replace(study.predicted, seconds=lambda row, _: None if row.get("backend") == "nccl" else 1.0)
    table = by_name.before(study.points(study.profiles[profile], describe_machine()), made_up())
    names = labels(table, by_name.naming(table))
    text = "".join(source for _, source in cells_of(lab))
    guesses = re.findall(r"lab\.predict\(({.*?})\)|# your own, in seconds: ({.*})", text)
    assert guesses
    for guess in guesses:
        assert set(named(ast.literal_eval("".join(guess)), names)) <= set(names)


def test_a_machine_without_a_calibration_is_told_how_to_get_one(lab, monkeypatch, capsys):
    monkeypatch.setattr("labkit.lab.notebook.newest_calibration", lambda machine: None)
    lab.predict({})
    assert "labkit measure limits" in capsys.readouterr().out


def test_alternatives_beside_a_run_that_is_only_drawn_are_refused(lab):
    lab.parameters = replace(lab.parameters, run="a run")
    with pytest.raises(ParameterError, match="set run = None"):
        lab.measure({"mine": print})
