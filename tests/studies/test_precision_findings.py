"""Findings of the precision lab on made-up frames: textbook, contrary, noisy, and with rows missing."""

from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd
import pytest

from labkit.studies.precision import tables
from labkit.studies.precision.numerics import NORM_STEPS
from labkit.studies.precision.study import STUDY
from labkit.studies.precision.worker import BOTH, FORWARD
from tests.calibrated import made_up
from tests.studies.answering import answers_of

_findings = partial(answers_of, STUDY)

SUMS = {"fp32": 10.000134, "fp16": 9.953125, "fp16_into_fp32": 10.002136, "bf16": 4.0, "bf16_into_fp32": 10.009766}
STORED = {"fp32": 10.0, "fp16": 10.002136, "fp16_into_fp32": 10.002136, "bf16": 10.009766, "bf16_into_fp32": 10.009766}


def _sums(sums=None):
    return [
        {"part": "accumulation", "device": "cpu", "variant": name, "additions": count}
        | {
            "sum": total if count == 1000 else min(total, count * 0.01),
            "exact_sum": count * 0.01,
            "stored_sum": STORED[name] * count / 1000,
        }
        for name, total in (SUMS | (sums or {})).items()
        for count in (100, 500, 1000)
    ]


def _dtypes(norm="float32", device="cuda"):
    return [
        {"part": "dtypes", "device": device, "model": model, "precision": "bfloat16"}
        | {"quantity": quantity, "observed": observed}
        for model in ("toy model", "Transformer")
        for quantity, observed in {"parameters": "float32", "norm": norm, "logits": "bfloat16"}.items()
    ]


def _norm(errors=None, overflowing="squares"):
    """Steps for small inputs, which lose nothing, and for large ones, of which one step overflows."""
    rows = []
    for precision in ("float16", "bfloat16"):
        for arithmetic in (precision, "float32"):
            for offset, scale in ((0.0, 1.0), (0.0, 300.0), (1000.0, 1.0)):
                for step in NORM_STEPS:
                    error = (errors or {}).get((arithmetic, offset, step), 1e-3)
                    over = step == overflowing and scale == 300 and arithmetic == "float16"
                    rows.append(
                        {"part": "norm", "device": "cpu", "precision": precision, "arithmetic": arithmetic}
                        | {"offset": offset, "scale": scale, "step": step, "underflowed": 0.0}
                        | {"error": None if over else error, "own_error": 0.0 if step == "centered" else error}
                        | {"overflowed": 0.4 if over else 0.0}
                    )
    return rows


def _textbook(model, mode, precision):
    full = {"nano": 0.01, "mini": 0.1, "small": 1.0}[model] * (3 if mode == BOTH else 1)
    gain = {"nano": 1.1, "mini": 0.6, "small": 0.3}[model]
    return full * (gain if precision == "bfloat16" else 1)


def _speed(seconds=_textbook, *, noise=0.01, repeats=12, check="ok", seed=0):
    generator = np.random.default_rng(seed)
    rows = []
    for model in ("nano", "mini", "small"):
        for mode in (FORWARD, BOTH):
            for precision in ("float32", "bfloat16"):
                base = {"part": "speed", "device": "cpu", "model": model, "mode": mode, "alternative": precision}
                base |= {"batch": 4, "context_length": 64}
                base |= {"check": check if precision == "bfloat16" else "ok", "error": 1e-2, "loss_error": 1e-5}
                for repeat in range(repeats):
                    time = seconds(model, mode, precision) * np.exp(generator.normal(0, noise))
                    rows.append(base | {"repeat": repeat, "seconds": time})
    return rows


def _frame(*parts):
    return pd.DataFrame([row for rows in parts or (_sums(), _dtypes(), _norm(), _speed()) for row in rows])


def _outcomes(frame):
    return [claim.outcome for claim in _findings(frame)["published_trends"].claims]


def test_every_question_is_answered_from_a_full_frame():
    assert all(finding.verdict != "not measured" for finding in _findings(_frame()).values())


@pytest.mark.parametrize("part", ["accumulation", "dtypes", "norm", "speed"])
def test_a_part_without_rows_leaves_the_other_findings(part):
    frame = _frame()
    findings = _findings(frame[frame["part"] != part])
    missing = [name for name, finding in findings.items() if finding.verdict == "not measured"]
    names = {"accumulation": "accumulation", "dtypes": "dtypes", "norm": "layer_norm", "speed": "autocast_speed"}
    assert missing == [names[part]]


def test_the_sources_of_an_error_are_told_apart():
    finding = _findings(_frame())["accumulation"]
    assert finding.headline == "In bf16 the sum ends at 4 instead of 10; fp32 comes closest."
    assert "+0.00977 is the term as bf16 holds it and -6.01 the rounding of the sum" in finding.why
    assert "stands still from 500 additions on; an fp32 sum of the same terms rounds by 0." in finding.why
    table = finding.table.set_index("variant")
    assert table.loc["fp16", ["term_error", "sum_error"]].tolist() == pytest.approx([0.002136, -0.049011])
    assert table["still_since"].dropna().to_dict() == {"bf16": 500}
    assert table["sum"]["fp32"] == "10.000134"


def test_sums_that_are_not_the_published_ones_contradict_them():
    assert _outcomes(_frame(_sums())) == ["holds here"]
    assert _outcomes(_frame(_sums({"fp16": 9.9}))) == ["is contradicted in some settings"]


def test_devices_whose_sums_differ_are_named():
    other = [row | {"device": "cuda"} for row in _sums({"bf16": 8.0})]
    finding = _findings(_frame(_sums(), other))["accumulation"]
    assert finding.caveat == "Devices differ in bf16."
    assert "ends at 8" in finding.headline, "of the accelerator"


def test_dtypes_are_told_by_model_and_devices_that_differ_are_named():
    finding = _findings(_frame(_dtypes()))["dtypes"]
    assert finding.headline == "Parameters and norm stay in float32; logits take autocast's dtype."
    finding = _findings(_frame(_dtypes(), _dtypes("bfloat16", "cpu")))["dtypes"]
    assert finding.headline == "Parameters stay in float32; logits take autocast's dtype."
    assert "float32 in the Transformer on cuda" in finding.also
    assert "bfloat16 in the Transformer on cpu" in finding.also


@pytest.mark.parametrize(
    ("step", "told"),
    [("squares", "the squares overflow"), ("mean", "the mean overflows"), (None, "no step overflows or underflows")],
)
def test_the_step_that_overflows_is_named_whichever_it_is(step, told):
    finding = _findings(_frame(_norm(overflowing=step)))["layer_norm"]
    assert finding.headline == f"In bfloat16 no step overflows or underflows; in float16 {told}."
    assert finding.table["overflows"].dropna().tolist() == ([] if step is None else [step])


def test_the_step_that_loses_digits_is_the_one_of_the_frame():
    errors = {(dtype, 1000.0, step): 0.1 for dtype in ("float16", "bfloat16") for step in NORM_STEPS[1:]}
    finding = _findings(_frame(_norm(errors)))["layer_norm"]
    assert (finding.advice, finding.significant) == ("Compute norms in float32: float16 can overflow.", True)
    calm = _findings(_frame(_norm(errors, overflowing=None)))["layer_norm"]
    assert calm.advice == "Compute norms in float32: 16 bits lose digits."
    table = finding.table
    row = table[(table["inputs"] == "1000 ± 1") & (table["precision"] == "bfloat16")].iloc[0]
    assert (row["most_lost"], row["is_exact"]) == ("centered", True)
    assert row[["output_digits", "with_float32_digits"]].tolist() == pytest.approx([1.0, 2.408], abs=1e-3)
    late = {("bfloat16", 1000.0, "rsqrt"): 0.1, ("bfloat16", 1000.0, "output"): 0.1}
    assert (
        'in the step "rsqrt" in bfloat16 (from 2.4 digits to 1.0)' in _findings(_frame(_norm(late)))["layer_norm"].also
    )
    assert _findings(_frame(_norm()))["layer_norm"].advice is None, "float32 would gain nothing"


def test_a_textbook_machine_gains_with_size():
    finding = _findings(_frame())["autocast_speed"]
    assert (finding.verdict, finding.significant) == ("it depends", True)
    assert "faster than float32 for mini and small, slower for nano" in finding.headline
    assert finding.also.startswith("The gain grows with the model")
    assert "batch 4 · 64 tokens" in finding.where
    told = _findings(_frame(), calibration=made_up())["autocast_speed"].why
    assert told.startswith("Operators of small should take ")
    assert finding.advice == "To save time, train under autocast to bfloat16 for mini and small."
    claims = _findings(_frame())["published_trends"].claims
    (grows,) = [claim for claim in claims if claim.text.startswith("The larger the model")]
    assert grows.outcome == "holds here"


@pytest.mark.parametrize(
    ("gains", "verdict", "trend", "outcome"),
    [
        ((3, 3, 3), "no", "No clear trend with size", "is not shown here"),
        ((0.3, 0.6, 0.9), "yes", "Larger models gain less", "is contradicted here"),
        ((4, 3, 2), "no", "The loss shrinks with the model", "is not shown here"),
        (
            (15, 18, 22),
            "no",
            "The loss grows with the model: forward and backward take 15 times",
            "is contradicted here",
        ),
    ],
)
def test_a_machine_that_contradicts_is_not_talked_round(gains, verdict, trend, outcome):
    by_model = dict(zip(("nano", "mini", "small"), gains, strict=True))
    findings = _findings(_frame(_speed(lambda model, mode, p: by_model[model] if p == "bfloat16" else 1.0)))
    assert findings["autocast_speed"].verdict == verdict
    assert findings["autocast_speed"].also.startswith(trend)
    (grows,) = [claim for claim in findings["published_trends"].claims if claim.text.startswith("The larger the model")]
    assert grows.outcome == outcome
    if verdict == "no":
        assert findings["autocast_speed"].advice == "Stay with float32."


def test_equal_times_but_for_noise_show_no_difference_and_few_repeats_claim_nothing():
    findings = _findings(_frame(_speed(lambda *_: 1.0, noise=0.3, seed=1)))
    speed = findings["autocast_speed"]
    assert (speed.verdict, speed.advice, speed.significant) == ("no clear difference", "Stay with float32.", False)
    assert findings["published_trends"].verdict == "undecided"
    assert _findings(_frame(_speed(repeats=3)))["autocast_speed"].verdict == "undecided"


def test_a_single_size_shows_no_trend():
    frame = _frame()
    one = frame[frame["model"].isin(["mini"]) | (frame["part"] != "speed")]
    assert _findings(one)["autocast_speed"].also is None


def test_wrong_results_are_shouted():
    rows = [row for row in _speed(check="wrong: loss off by 1") if row["check"] == "ok"]
    wrong = {"part": "speed", "device": "cpu", "model": "nano", "alternative": "bfloat16", "error": 9.0}
    finding = _findings(_frame(rows, [wrong | {"loss_error": 1.0, "check": "wrong: loss off by 1.0e+00"}]))
    assert finding["autocast_speed"].verdict == "not measured"
    assert "WRONG RESULTS, and so no times, from bfloat16" in finding["autocast_speed"].caveat


def test_a_predicted_ratio_is_of_what_the_operators_should_take():
    """Where products are all that takes time, bfloat16 saves what its products save."""
    rates = made_up(bytes_per_s=1e30, call_s=1e-30).rates[0]
    faster = tuple((flops, seconds / 4) for flops, seconds in rates.products["float32"])
    machine = replace(made_up(), rates=(replace(rates, products=rates.products | {"bfloat16": faster}),))
    table = tables.ratios(_frame(_speed(noise=0)), machine)
    assert table["predicted_ratio"].tolist() == pytest.approx([0.25] * len(table), rel=0.01)
    assert table.set_index(["model", "mode"])["ratio"]["mini", BOTH] == pytest.approx(0.6)
    by_memory = tables.ratios(_frame(_speed()), made_up(flops_per_s=1e30))["predicted_ratio"]
    assert (by_memory > 0.5).all()  # weights are cast, and read and written for it
    assert tables.ratios(_frame(_speed()))["predicted_ratio"].isna().all()


def test_correct_digits():
    assert tables.correct_digits(1e-2, "float16") == pytest.approx(2)
    assert tables.correct_digits(0.0, "bfloat16") == pytest.approx(2.408, abs=1e-3)
    assert tables.correct_digits(None, "float16") == tables.correct_digits(5.0, "float16") == 0
