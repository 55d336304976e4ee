"""Findings of the end-to-end lab on made-up frames: textbook, contrary, noisy, and with rows missing."""

from functools import partial

import numpy as np
import pandas as pd
import pytest

from labkit.costs.transformer import forward_flops, n_parameters
from labkit.nn.transformer import SIZES
from labkit.studies.end_to_end import tables
from labkit.studies.end_to_end.study import STUDY
from tests.calibrated import made_up
from tests.studies.answering import answers_of

MACHINE = made_up()
_findings = partial(answers_of, STUDY, calibration=MACHINE)

POINT = {"device": "cpu", "precision": "float32", "batch": 4, "context_length": 128, "check": "ok", "trial": 0}


def _textbook(size, phase):
    """Exactly what its operators should take."""
    return tables.PREDICTED.seconds(POINT | {"size": size, "phase": phase}, MACHINE)


def _frame(
    seconds=_textbook,
    *,
    first=3.0,
    compiled=0.5,
    noise=0.001,
    sizes=("nano", "mini"),
    repeats=12,
    precision="float32",
    peak=None,
    sweeps=("phases", "warmup", "compile"),
):
    generator = np.random.default_rng(0)
    point = POINT | {"precision": precision, "peak_flops_per_s": peak}
    rows = []

    def add(sweep, count, value, column="seconds", **fields):
        for repeat in range(count):
            jitter = np.exp(generator.normal(0, noise))
            rows.append(point | fields | {"sweep": sweep, "repeat": repeat, column: value(repeat) * jitter})

    for size in sizes:
        for phase in ("inference", "forward", "backward", "optimizer"):
            add("phases", repeats, lambda _, s=size, p=phase: seconds(s, p), size=size, phase=phase)
        step = sum(seconds(size, phase) for phase in ("forward", "backward", "optimizer"))
        for trial in range(8):
            add("warmup", 15, lambda n, t=step: t * (first if n == 0 else 1), size=size, phase="step", trial=trial)
        for phase in ("inference", "step"):
            for name, factor in (("eager", 1), ("compiled", compiled)):
                extra = {"compile_s": 10.0, "error": 1e-6} if name == "compiled" else {}
                add(
                    "compile",
                    repeats,
                    lambda _, f=factor, t=step: t * f,
                    size=size,
                    phase=phase,
                    implementation=name,
                    **extra,
                )
    frame = pd.DataFrame(rows)
    return frame[frame["sweep"].isin(sweeps)]


def _with(frame, *rows):
    return pd.concat([frame, pd.DataFrame([POINT | row for row in rows])], ignore_index=True)


def test_a_textbook_machine_is_answered_in_full():
    findings = _findings(_frame())
    verdicts = {"warmup": "yes", "predicted": "yes", "compile": "yes", "published_trends": "yes"}
    assert {key: finding.verdict for key, finding in findings.items()} == {"step_times": "measured"} | verdicts
    warmup = findings["warmup"]
    assert warmup.headline == "Yes: a later step is 3 times faster than the first of its process."
    assert warmup.also == "Before a mean of ten steps, 1 warm-up step is enough."
    assert warmup.advice == "Leave the first step of a process out of every mean."
    assert dict(zip(warmup.table["steps"], warmup.table["ratio"], strict=True)) == pytest.approx(
        {1: 1 / 3, 10: 10 / 12}, rel=0.01
    )
    assert findings["compile"].headline == "Yes: the compiled model is 2 times faster than the eager one."
    nano = sum(_textbook("nano", phase) for phase in ("forward", "backward", "optimizer"))
    worth = findings["compile"].table["worth_it_after"].max()
    assert worth == pytest.approx(10.0 / (nano / 2), rel=0.02)
    steps = f"{round(worth, -1):.0f} steps"
    assert findings["compile"].also == f"Compiling takes up to 10 s and pays for itself within about {steps}."
    assert findings["compile"].advice == f"Compile nano and mini as a whole for runs of more than {steps}."


@pytest.mark.parametrize("missing", ["phases", "warmup", "compile"])
def test_a_missing_sweep_leaves_the_other_findings(missing):
    sweeps = [sweep for sweep in ("phases", "warmup", "compile") if sweep != missing]
    verdicts = {key: finding.verdict for key, finding in _findings(_frame(sweeps=sweeps)).items()}
    silent = {
        "phases": {"step_times", "predicted"},
        "warmup": {"warmup"},
        "compile": {"compile"},
    }[missing]
    assert {key for key, verdict in verdicts.items() if verdict == "not measured"} == silent


def test_the_step_is_the_sum_of_its_parts_repeat_by_repeat():
    table = tables.phases(_frame(noise=0))
    seconds = table.set_index(["size", "phase"])["seconds"]
    parts = sum(seconds["mini", phase] for phase in ("forward", "backward", "optimizer"))
    assert seconds["mini", "step"] == pytest.approx(parts)
    drawn = tables.step_parts(table)
    assert drawn["phase"].unique().tolist() == ["forward", "backward", "optimizer", "step"]
    assert set(drawn["model"]) == {"nano", "mini"}
    both = pd.concat([table, table.assign(precision="bfloat16")])
    assert set(tables.step_parts(both)["model"]) == {
        f"{size}, {kind}" for size in ("nano", "mini") for kind in ("float32", "bfloat16")
    }
    only_forward = _frame()[lambda rows: rows["phase"].isin(["inference", "forward"])]
    assert "step" not in set(tables.phases(only_forward)["phase"])
    assert "One forward of the model mini" in _findings(only_forward)["step_times"].headline


def test_how_much_repeats_vary_is_told_of_all_rows_and_not_of_one():
    frame = _frame(noise=0)
    steady, uneven = frame["phase"] == "forward", (frame["phase"] == "optimizer") & (frame["size"] == "nano")
    frame.loc[steady & (frame["size"] == "mini"), "seconds"] *= 2
    frame.loc[uneven & (frame["sweep"] == "phases"), "seconds"] *= 1 + 0.3 * (frame["repeat"] % 2)
    found = _findings(frame)["step_times"]
    spread = found.table["spread_percent"]
    told = f"The standard deviation of repeats is typically {spread.median():.1f} %, at most {spread.max():.1f} % "
    told += "(optimizer of nano)."
    assert (found.also, round(spread.max())) == (told, 14)
    assert found.where == "21.8 million parameters · float32 · cpu · batch 4 · 128 tokens"


def test_times_as_their_operators_should_take_agree_and_others_do_not():
    table = tables.predictions(_frame(_textbook, noise=0), MACHINE)
    assert table["measured_over_predicted"].tolist() == pytest.approx([1.0] * 12, rel=1e-6)
    assert table["mfu_percent"].isna().all()
    assert _findings(_frame(lambda size, phase: 10 * _textbook(size, phase)))["predicted"].verdict == "no"


def test_a_prediction_is_products_where_memory_is_fast_and_bytes_where_arithmetic_is():
    row = {"device": "cpu", "precision": "float32", "size": "mini", "batch": 4, "context_length": 128}
    only_arithmetic = made_up(bytes_per_s=1e30, call_s=1e-30)
    flops = sum(forward_flops(SIZES["mini"], 4, 128).values())
    assert tables.PREDICTED.seconds(row | {"phase": "forward"}, only_arithmetic) == pytest.approx(
        flops / 1e11, rel=0.01
    )
    twice = tables.PREDICTED.seconds(row | {"phase": "backward"}, only_arithmetic)
    assert twice == pytest.approx(2 * flops / 1e11, rel=0.01)
    only_memory = made_up(flops_per_s=1e30, call_s=1e-30)
    update = tables.PREDICTED.seconds(row | {"phase": "optimizer"}, only_memory)
    least = 28 * n_parameters(SIZES["mini"]) / 1e10  # of an update in one pass
    assert 2 * least < update < 5 * least
    assert tables.PREDICTED.seconds(row | {"device": "cuda", "phase": "optimizer"}, only_memory) is None


def test_utilization_is_told_against_the_peak_of_its_precision_alone_however_far_a_step_goes():
    frame = _frame(_textbook, noise=0, precision="bfloat16", peak=1e12)
    forward_only = frame[frame["phase"].isin(["inference", "forward"])]
    table = tables.predictions(forward_only, MACHINE).set_index(["size", "phase"])
    row = table.loc[("nano", "forward")]
    assert row["mfu_percent"] == pytest.approx(100 * row["flops"] / row["seconds"] / 1e12)
    assert "% of the data-sheet peak" in _findings(forward_only)["predicted"].why
    assert tables.predictions(_frame(peak=1e12), MACHINE)["mfu_percent"].isna().all()


def test_first_steps_that_are_not_slower_advise_nothing_and_faster_ones_are_not_called_slow():
    equal, faster = (_findings(_frame(first=first))["warmup"] for first in (1.0, 0.1))
    assert (equal.verdict, equal.advice, equal.significant) == ("no clear difference", None, False)
    assert equal.also is None
    slight = _findings(_frame(first=1.2))["warmup"]
    assert (slight.verdict, slight.advice) == ("yes", None), "a mean of ten does not notice"
    assert slight.also.startswith("No clear difference in time between ten later steps together and the first ten")
    few = _frame()
    few = _findings(few[~(few["trial"] > 2)])["warmup"]
    assert (few.verdict, few.also, few.advice) == ("undecided", None, None), "nothing is known to be enough"
    assert (faster.verdict, faster.advice, faster.significant) == ("no", None, True)


def test_where_steps_grow_faster_to_the_end_no_number_of_first_steps_is_called_enough():
    frame = _frame()
    slows = (frame["sweep"] == "warmup") & (frame["repeat"] < 15)
    frame.loc[slows, "seconds"] *= 1.2 ** (15 - frame.loc[slows, "repeat"])
    assert "at least the first 5; more were not tried" in _findings(frame)["warmup"].also


def test_every_step_that_changes_a_mean_is_left_out():
    frame = _frame()
    is_second = (frame["sweep"] == "warmup") & (frame["repeat"] == 1)
    frame.loc[is_second, "seconds"] *= 3
    assert tables.enough_warmup(frame) == 2
    assert _findings(frame)["warmup"].advice == "Leave the first 2 steps of a process out of every mean."
    assert _findings(frame)["warmup"].headline.startswith("Yes: a later step is 3 times faster")
    later = _frame(first=1.0)
    later.loc[(later["sweep"] == "warmup") & (later["repeat"] == 1), "seconds"] *= 3
    found = _findings(later)["warmup"]
    assert found.headline.startswith("Yes: ten later steps together"), "the first step alone is as fast as later ones"
    assert found.advice == "Leave the first 2 steps of a process out of every mean."
    means = tables.mean_by_warmup(frame).set_index(["size", "warmup"])["mean_s"]
    assert means["nano", 0] / means["nano", 5] == pytest.approx(1.4, rel=0.01)


def test_wrong_results_are_shouted_where_they_were_measured():
    loss = {"sweep": "phases", "size": "mini", "check": "wrong: the loss is nan"}
    gradient = {"sweep": "compile", "size": "nano", "implementation": "compiled", "check": "wrong: error 1e+00"}
    findings = _findings(_with(_frame(sizes=("nano",), sweeps=["phases"]), loss, gradient))
    assert findings["step_times"].verdict == "measured"
    assert findings["step_times"].caveat == "WRONG RESULTS, and so no times, from mini: wrong: the loss is nan."
    assert findings["compile"].verdict == "not measured"
    assert findings["compile"].caveat == "WRONG RESULTS, and so no times, from nano: wrong: error 1e+00."
    alone = _findings(pd.DataFrame([POINT | loss]))["step_times"]
    assert (alone.verdict, "the loss is nan" in alone.caveat) == ("not measured", True)


def test_slower_compiled_code_is_advised_against_and_noise_shows_nothing():
    slow, noisy = (
        _findings(_frame(**given))["compile"] for given in ({"compiled": 2.0}, {"compiled": 1.0, "noise": 0.5})
    )
    assert (slow.verdict, noisy.verdict) == ("no", "no clear difference")
    assert slow.advice == noisy.advice == "Stay with the eager model."
    assert slow.also == "Compiling takes up to 10 s."
    assert (slow.significant, noisy.significant) == (True, False)


def test_published_trends_are_contradicted_where_they_are():
    def contrary(size, phase):
        return _textbook(size, phase) * (0.2 if phase == "backward" else 1)

    finding = _findings(_frame(contrary, compiled=2.0))["published_trends"]
    assert finding.verdict == "it depends"  # the spread is as small as published
    assert [claim.outcome for claim in finding.claims].count("is contradicted here") == 3
    noisy = _findings(_frame(noise=0.5, compiled=1.0))["published_trends"]
    assert "holds here" not in {claim.outcome for claim in noisy.claims}
