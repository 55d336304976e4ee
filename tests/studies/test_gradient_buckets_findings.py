"""Findings of the gradient-buckets lab on made-up frames: textbook, contrary, noisy, and with rows missing."""

from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd
import pytest

from labkit.costs.calibration import ALL_REDUCE, Transport
from labkit.costs.communication import AlphaBeta, best_buckets, bucket_overhead
from labkit.studies.gradient_buckets import model, tables
from labkit.studies.gradient_buckets.study import STUDY
from labkit.studies.gradient_buckets.worker import LOCAL, STEPS
from tests.calibrated import made_up
from tests.studies.answering import answers_of

MIB = 2**20
GRADIENTS = 1000 * MIB
BUCKETS = {1.0: 1000, 10.0: 100, 100.0: 10, 1000.0: 1}
TRUTH = AlphaBeta(1e-4, 1 / 10e9)
GLOO = Transport(way="gloo", what=ALL_REDUCE, ranks=2, alpha_s=TRUTH.alpha_s, beta_s_per_byte=TRUTH.beta_s_per_byte)
MACHINE = replace(made_up(), transports=(GLOO,))
_findings = partial(answers_of, STUDY, calibration=MACHINE)
SETTINGS = [(batch, sequence) for batch in (2, 4) for sequence in (128, 256, 512)]


def _computing(batch, sequence):
    return 0.2 + 2e-4 * batch * sequence


def _overhead(bucket_mb, batch, sequence):
    """All but the last bucket hide."""
    return TRUTH.predict_s(bucket_overhead(BUCKETS[bucket_mb], GRADIENTS))


def _nothing_hides(bucket_mb, batch, sequence):
    return BUCKETS[bucket_mb] * TRUTH.alpha_s + GRADIENTS * TRUTH.beta_s_per_byte


def _nothing(bucket_mb, batch, sequence):
    return 0.0


def _frame(waiting=_overhead, beside=_nothing, *, noise=0.002, repeats=12, sizes=tuple(BUCKETS), settings=SETTINGS):
    """Rows as a run would have them: two ranks report, the second is the slower one."""
    generator = np.random.default_rng(0)
    rows = []

    def add(row, seconds):
        for repeat in range(repeats):
            slowest = seconds * np.exp(generator.normal(0, noise))
            rows.extend(
                row | {"rank": rank, "repeat": repeat, "seconds": slowest * (0.9 + rank / 10)} for rank in (0, 1)
            )

    machine = {"workload": "xl", "world_size": 2, "backend": "gloo", "device": "cpu", "check": "ok"}
    for batch, sequence in settings:
        here = machine | {"sweep": STEPS, "batch": batch, "sequence": sequence}
        add(here | {"alternative": LOCAL, "phase": "step"}, _computing(batch, sequence))
        for size in sizes:
            row = here | {"alternative": f"{size:g} MiB", "bucket_mb": size, "buckets": BUCKETS[size]}
            row |= {"last_bucket_bytes": GRADIENTS / BUCKETS[size], "gradient_bytes": GRADIENTS, "error": 1e-6}
            waits = waiting(size, batch, sequence)
            add(row | {"phase": "waiting"}, waits)
            add(row | {"phase": "step"}, _computing(batch, sequence) + waits + beside(size, batch, sequence))
    return pd.DataFrame(rows)


def test_every_question_is_answered_from_a_full_frame():
    assert all(finding.verdict != "not measured" for finding in _findings(_frame()).values())


def test_the_slowest_rank_counts_and_steps_are_compared_within_a_repeat():
    table = tables.steps(_frame(noise=0))
    row = table[(table["batch"] == 2) & (table["sequence"] == 128) & (table["bucket_mb"] == 10)].iloc[0]
    waits = _overhead(10.0, 2, 128)
    assert row["waiting_s"] == pytest.approx(waits)
    assert row["exposed_s"] == pytest.approx(waits)
    assert row["contention_s"] == pytest.approx(0, abs=1e-12)
    assert row["waiting_percent"] == pytest.approx(100 * waits / (_computing(2, 128) + waits))


def test_a_machine_on_which_nothing_hides_waits_as_predicted():
    finding = _findings(_frame(_nothing_hides))["model"]
    assert finding.verdict == "yes"
    assert finding.table["measured_over_predicted"].tolist() == pytest.approx([1.0] * 24, rel=0.01)
    assert finding.also.startswith("It predicts the shortest step with buckets of 1000 MiB, and none is faster")


def test_only_of_several_buckets_all_but_the_last_can_hide():
    finding = _findings(_frame(_nothing_hides, noise=0, sizes=(100.0, 1000.0)))["model"]
    share = _overhead(100.0, 2, 128) / _nothing_hides(100.0, 2, 128)
    assert f"would typically add {100 * share:.0f} % of what it does" in finding.why
    assert _findings(_frame(_nothing_hides, sizes=(1000.0,)))["model"].why is None


def test_a_setting_says_what_grows_from_where_to_where():
    frame = _frame(settings=[(2, 128), (2, 256)], sizes=(1.0, 10.0))
    finding = _findings(frame)["batch_and_length"]
    settings = [
        f"xl, 2 ranks, gloo, cpu, batch 2, 128 tokens, buckets of {size} MiB, 256 tokens instead" for size in (1, 10)
    ]
    assert [effect.setting for effect in finding.effects] == settings
    assert len({effect.setting for effect in _findings(_frame())["batch_and_length"].effects}) == 7 * 4


def test_without_a_calibration_nothing_is_predicted_and_the_rest_is_answered():
    finding = _findings(_frame(), calibration=None)["model"]
    assert finding.verdict == "not measured"
    assert "no calibration" in finding.headline
    assert set(model.curves(_frame(), None)["batch_x_sequence"]) == {model.FITTED}
    assert "no calibration" not in _findings(pd.DataFrame({"sweep": ["other"]}), calibration=None)["model"].headline
    gpus = _findings(_frame().assign(backend="nccl", device="cuda"))["model"]
    assert gpus.verdict == "not measured"


def test_a_textbook_machine_has_an_optimum_and_the_fit_finds_it():
    findings = _findings(_frame())
    size = findings["bucket_size"]
    assert (size.verdict, size.significant) == ("yes", True)
    assert size.advice is None  # against the smallest buckets, which nobody has by default
    assert findings["model"].verdict != "yes"  # here nearly everything hides
    constants = model.constants(_frame(noise=0), MACHINE).set_index("model")
    assert constants["call_s"].to_list() == pytest.approx([TRUTH.alpha_s] * 3, rel=1e-3)
    assert constants["bandwidth_bytes_per_s"].to_list() == pytest.approx([1 / TRUTH.beta_s_per_byte] * 3, rel=1e-3)
    best = best_buckets(GRADIENTS, TRUTH)
    assert constants["best_buckets"].to_list() == pytest.approx([1, best, best], rel=1e-3)
    assert findings["batch_and_length"].verdict == "yes"


def test_numbers_come_from_the_frame():
    finding = _findings(_frame(lambda *_: 0.05, noise=0, settings=[(2, 128)]))["waiting"]
    assert finding.headline == "A step spends 17 % of its time waiting for its gradients."
    assert finding.table["exposed_s"].tolist() == pytest.approx([0.05] * 4)
    assert finding.table["local_s"].tolist() == pytest.approx([_computing(2, 128)] * 4)


@pytest.mark.parametrize("noise", [0.005, 0.3])
def test_between_sizes_no_difference_is_told_that_is_not_seen(noise):
    finding = _findings(_frame(lambda *_: 0.05, noise=noise))["bucket_size"]
    assert (finding.verdict, finding.significant) == ("no clear difference", False)


def test_waiting_that_is_only_moved_into_backward_is_no_gain():
    """Small buckets wait less, and the backward pass beside them is as much slower."""
    all_bytes = GRADIENTS * TRUTH.beta_s_per_byte

    def waits(size, *_):
        return all_bytes * size / 1000

    findings = _findings(_frame(waits, lambda size, *_: all_bytes - waits(size)))
    assert findings["bucket_size"].verdict == "no clear difference"
    assert "less than those of 1000 MiB, but slow the rest of the step by" in findings["bucket_size"].why
    assert "slows down the backward pass" in findings["waiting"].why


def test_one_bucket_runs_beside_nothing():
    frame = _frame(beside=lambda size, *_: 0.05 if size == 1000 else 0.0)
    assert "slows down" not in _findings(frame)["waiting"].why
    assert "With one bucket of 1000 MiB" in _findings(frame)["waiting"].why


def test_a_rank_that_waits_for_a_slower_one_is_told_from_communication():
    finding = _findings(_frame(lambda *_: 0.08, lambda *_: -0.05))["waiting"]
    assert "is waiting for a slower rank" in finding.why
    assert finding.table["contention_s"].tolist() == pytest.approx([-0.05] * 24, abs=3e-3)


def test_a_machine_that_contradicts_the_model_is_not_talked_round():
    """The most calls wait least here, and one bucket most."""
    findings = _findings(_frame(lambda size, *_: 0.5 / BUCKETS[size] ** 0.5))
    assert findings["model"].verdict != "yes"
    assert "but those of 1 MiB, 10 MiB and 100 MiB are faster" in findings["model"].also
    assert findings["bucket_size"].verdict == "no"
    outcomes = {claim.outcome for claim in findings["published_trends"].claims}
    assert "is contradicted here" in outcomes


def test_a_share_that_rises_with_the_sequence_is_said_to():
    finding = _findings(_frame(lambda size, batch, sequence: 0.001 * (batch * sequence) ** 1.0))["batch_and_length"]
    assert finding.verdict == "no"
    assert "larger than with fewer" in finding.headline
    assert set(finding.table["verdict"]) == {"larger"}


@pytest.mark.parametrize(("slow", "verdict"), [(1.0, "yes"), (10.0, "no"), (100.0, "no")])
def test_one_setting_is_enough_to_see_a_size_that_is_far_slower(slow, verdict):
    frame = _frame(lambda size, *_: 34 * 0.3 if size == slow else 0.01, sizes=(1.0, 10.0, 100.0), settings=[(2, 128)])
    finding = _findings(frame)["bucket_size"]
    assert (finding.verdict, finding.significant) == (verdict, True)


def test_waiting_that_depends_on_bytes_alone_fits_calls_that_cost_nothing():
    frame = _frame(lambda size, *_: GRADIENTS / BUCKETS[size] / 10e9, noise=0)
    assert model.fitted(frame)["xl", 2, "gloo", "cpu"].alpha_s == pytest.approx(0, abs=1e-9)
    assert "inf" not in _findings(frame)["model"].why


def test_too_few_repeats_claim_nothing():
    findings = _findings(_frame(repeats=3))
    assert findings["bucket_size"].verdict == findings["batch_and_length"].verdict == "undecided"


@pytest.mark.parametrize("missing", [LOCAL, "waiting", "one size", "one setting"])
def test_with_rows_missing_the_other_questions_are_answered(missing):
    frame = _frame()
    kept = {
        LOCAL: frame["alternative"] != LOCAL,
        "waiting": frame["phase"] != "waiting",
        "one size": frame["bucket_mb"].isna() | (frame["bucket_mb"] == 10),
        "one setting": frame["batch"].isna() | ((frame["batch"] == 2) & (frame["sequence"] == 128)),
    }[missing]
    silent = {"waiting": {"batch_and_length"}, "one size": {"bucket_size"}}
    silent |= {"one setting": {"batch_and_length"}, LOCAL: {"model"}}
    findings = _findings(frame[kept])
    assert {key for key, finding in findings.items() if finding.verdict == "not measured"} == silent[missing]


def test_wrong_gradients_are_shouted():
    frame = _frame()
    bad = {"sweep": STEPS, "alternative": "1 MiB", "check": "wrong: error 5.0e-01, at most 1.0e-03 expected"}
    assert _findings(pd.concat([frame, pd.DataFrame([bad])]))["waiting"].caveat.startswith("WRONG RESULTS")
    alone = _findings(pd.DataFrame([bad | {"workload": "xl"}]))["waiting"]
    assert alone.verdict == "not measured"
    assert "1 MiB" in alone.caveat


def test_the_published_trends_hold_in_the_published_numbers():
    """Fed to the lab as if measured, they show what is claimed of them."""
    table = tables.published().set_index(["bucket_mb", "batch", "sequence"])

    def of(column):
        return lambda *key: float(table.loc[key, column])

    frame = _frame(
        of("waiting_s"),
        lambda *key: of("step_s")(*key) - of("waiting_s")(*key) - _computing(*key[1:]),
        noise=0.0005,
    )
    claims = _findings(frame)["published_trends"].claims
    assert "is contradicted here" not in {claim.outcome for claim in claims}
    assert len(claims) == 3  # there is one bucket of 1000 MiB here, so that it is not compared
