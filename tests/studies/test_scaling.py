"""The scaling lab: what it computes of the published rows, and what is said of it."""

from dataclasses import replace
from functools import cache

import numpy as np
import pandas as pd
import pytest

from labkit.costs.transformer import SIZES, n_parameters
from labkit.lab.config import ParameterError, resolve_config
from labkit.machine import describe_machine
from labkit.studies.scaling import here, tables
from labkit.studies.scaling.study import STUDY
from labkit.studies.scaling.worker import measure_point
from labkit.studies.shared.step_operators import OPTIMIZER, step_operators
from tests.calibrated import made_up


@cache
def _frame():
    """The frame of a run at profile smoke, without ranks: everything is computed."""
    rows = []
    for point in STUDY.points(STUDY.profiles["smoke"], describe_machine()):
        about = {"sweep": point.sweep, "model": point.model, "gpus": point.gpus}
        for values in measure_point(point):
            rows.append(pd.DataFrame(about | values, index=None if _has_lists(values) else [0]))
    return pd.concat(rows, ignore_index=True)


def _has_lists(values):
    return any(isinstance(value, list) for value in values.values())


def _finding(identifier, frame=None):
    return STUDY.findings(_frame() if frame is None else frame, pd.DataFrame())[identifier]


def test_every_timed_row_is_on_the_scoreboard():
    board = tables.scoreboard(_frame())
    assert board["group"].tolist() == list(tables.GROUPS)
    assert board["rows"].sum() == 2460
    assert (board["median_percent"] < 8).all()
    assert (board["median_percent"] < board["framework_left_out_median_percent"]).all()


def test_the_intervals_never_saw_the_model_and_hold_about_nine_of_ten():
    table = tables.errors(_frame())
    assert ((table["low"] <= table["predicted_s"]) & (table["predicted_s"] <= table["high"])).all()
    assert 0.85 <= table["covered"].mean() <= 0.95


@pytest.mark.parametrize(("off", "verdict"), [(1.0, "yes"), (3.0, "no")])
def test_verdicts_follow_the_numbers(off, verdict):
    frame = _frame().copy()
    published = frame["sweep"] == "published"
    frame.loc[published, "predicted_s"] = frame.loc[published, "measured_s"] * off
    width = np.where(np.arange(published.sum()) % 10 > 0, 10.0, 1.0) if off == 1.0 else 1.0
    frame.loc[published, "low"] = frame.loc[published, "predicted_s"] * (2 - off if off == 1.0 else 1) * 1.001 / width
    frame.loc[published, "high"] = frame.loc[published, "predicted_s"] * 10
    assert _finding("rivals", frame.assign(one_constant_s=2 * frame["measured_s"])).verdict == verdict
    assert _finding("coverage", frame).verdict == verdict


def test_rows_that_are_far_off_are_told_with_the_reason_where_it_is_known():
    table = tables.worst(_frame())
    assert table["times_off"].is_monotonic_decreasing
    assert table["times_off"].min() > 2
    assert 0 < (table["why"] == tables.UNKNOWN).sum() < len(table)
    of_engine = table[table["why"].str.contains("before its fix|before nanotron's fix")]
    assert len(of_engine)
    off = of_engine["other_pipeline_s"].astype(float) / of_engine["measured_s"].astype(float)
    assert off.between(1 / 1.5, 1.5).all()
    older = tables.worst(_frame().drop(columns="other_pipeline_s"))
    assert len(older) == len(table)
    assert not older["why"].str.contains("fix").any()


def test_a_trend_is_predicted_only_in_its_size():
    frame = _frame().copy()
    assert _finding("trends", frame).verdict == "it depends"
    frame.loc[frame["trend"] == "Llama 3, 405B", "mfu_percent"] = [43.0, 40.5]
    assert _finding("trends", frame).verdict == "yes"
    frame.loc[frame["trend"] == "Llama 3, 405B", "mfu_percent"] = [40.0, 43.0]
    assert _finding("trends", frame).verdict != "yes"


def test_intervals_that_hold_nearly_all_rows_are_too_wide():
    frame = _frame().copy()
    nine_of_ten = np.arange(len(frame)) % 10 > 0
    frame["low"], frame["high"] = 0.0, np.where(nine_of_ten | (frame["group"] == "dgxc"), np.inf, 0.0)
    found = _finding("coverage", frame)
    assert found.verdict == "it depends"
    assert "too many on dgxc" in found.caveat


def test_nothing_here_is_called_measured():
    assert {_finding(one.id).verdict for one in STUDY.questions} & {"measured"} == set()


def test_a_step_is_the_sum_of_its_parts_on_every_number_of_gpus():
    for _, own in tables.waterfalls(_frame()).groupby(["model", "gpus"]):
        whole = own[own["part"] == tables.STEP]
        assert whole["gpu_hours"].item() == pytest.approx(own["gpu_hours"].sum() / 2, rel=1e-3)
    assert tables.shares(_frame()).groupby(["model", "gpus"])["share_percent"].sum().tolist() == pytest.approx(
        [100, 100], rel=1e-3
    )


def test_where_there_is_more_to_compute_less_of_a_step_is_communication():
    for kind, own in tables.margins(_frame()).groupby("kind"):
        enough = own[own["rows"] >= 10].sort_values(tables.RATIO)
        assert enough["exposed_percent"].is_monotonic_decreasing, kind


def test_choices_beat_the_smallest_layout():
    table = tables.choices(_frame())
    assert (table["best_of_three_behind_percent"] <= 5).all()
    assert (table["first_behind_percent"] > 5).any()
    assert _finding("choice").verdict == "it depends"
    best, first, simple = "best_of_three_behind_percent", "first_behind_percent", "simple_behind_percent"
    assert _finding("choice", _frame().assign(**{first: _frame()[best]})).verdict == "yes"
    assert _finding("choice", _frame().assign(**{first: _frame()[simple], best: _frame()[simple]})).verdict == "no"


def test_a_rival_that_claims_less_is_named():
    """On its own rows RAPID-LLM does."""
    assert _finding("rivals").verdict == "it depends"
    assert "RAPID-LLM" in _finding("rivals").headline


def test_a_training_that_fits_nowhere_says_what_it_needs():
    point = STUDY.points(resolve_config("scaling", STUDY.profiles, "smoke", {"models": ["llama-3-405b"]}), None)[-1]
    (row,) = measure_point(point)
    assert "GiB per GPU" in row["not_measured"]


@pytest.mark.parametrize("wrong", [{"models": ["llama-9"]}, {"gpu": "h900"}, {"gpus": [0]}, {"gpus": [10**6]}])
def test_what_does_not_exist_is_refused(wrong):
    with pytest.raises(ParameterError, match="scaling"):
        resolve_config("scaling", STUDY.profiles, "smoke", wrong)


def _sharding_run():
    """Two repeats of a step of each way, on two ranks over each transport, under two optimizers."""
    ways = ["ddp", "zero3", "torch_ddp", "torch_zero1", "torch_zero3", "gather"]
    return pd.DataFrame(
        [
            {"way": way, "part": part, "repeat": repeat, "rank": rank, "seconds": 0.1}
            | {"kind": "time", "size": "mini", "world_size": 2, "transport": transport, "device": "cpu"}
            | {"batch": 1.0, "context_length": 32.0, "optimizer": optimizer, "point": f"{transport} {optimizer}"}
            for way in ways
            for part in (["gather"] if way == "gather" else ["forward", "backward", "optimizer"])
            for repeat in range(2)
            for rank in range(2)
            for transport in ("shared", "point to point")
            for optimizer in ("AdamW", "SGD")
        ]
    )


def test_torchs_sharding_steps_are_predicted_too_with_what_gloo_makes_of_them():
    machine = describe_machine()
    found = list(here._sharding(_sharding_run()))
    steps = {step["implementation"]: step for step in found}
    assert set(steps) == {
        *("ddp, shared memory", "zero3, shared memory", "ddp, messages", "zero3, messages"),
        *("torch_ddp, messages", "torch_zero1, messages", "torch_zero3, messages"),
    }
    assert len(found) == len(steps)  # torch's ways once, though they took turns with labkit's over both
    assert all(step["measured_s"] == pytest.approx(0.3) for step in found)  # of AdamW alone
    seconds = {name: here._predicted_s(made_up(), machine, step) for name, step in steps.items()}
    n_bytes = 4 * n_parameters(SIZES["mini"])
    rates = made_up().transports[0]
    computing = here._compute_s(made_up(), machine, steps["torch_zero3, messages"], 2)
    calls = 3 * (SIZES["mini"].n_layers + 1)  # two gathers, and a whole all-reduce instead of a reduce-scatter
    moved = 2 * n_bytes / 2 + n_bytes  # two gathers are half an all-reduce each
    expected = computing + calls * rates.alpha_s + moved * rates.beta_s_per_byte
    assert seconds["torch_zero3, messages"] == pytest.approx(expected, rel=1e-6)
    assert seconds["torch_ddp, messages"] == seconds["ddp, shared memory"]  # as fast ways, the same calls


def test_the_optimizer_of_own_ranks_moves_what_its_operators_do():
    calls = step_operators(SIZES["nano"], 1, 8)[OPTIMIZER]
    assert sum(call.n_bytes for call in calls) / n_parameters(SIZES["nano"]) == pytest.approx(
        here.BYTES_OF_ADAMW, rel=1e-3
    )


def test_cpu_ranks_are_predicted_by_the_rates_of_the_cpu():
    known = made_up()
    gpu = tuple(
        replace(one, device="cuda", products=dict.fromkeys(one.products, ((1e3, 1e-12),))) for one in known.rates
    )
    both = replace(known, rates=(*gpu, *known.rates))
    step = {"workload": "mini", "world_size": 2, "stage": None, "batch": 1, "context_length": 32}
    machine = describe_machine()
    assert here._predicted_s(both, machine, step) == here._predicted_s(known, machine, step)
