"""Answers of the gradient-buckets lab on made-up frames: textbook, contrary, noisy, and with rows missing."""

import re
from functools import partial

import numpy as np
import pandas as pd
import pytest

from labkit.costs.communication import AlphaBeta, MessageCost, best_buckets, bucket_overhead
from labkit.studies.gradient_buckets import analysis, model
from labkit.studies.gradient_buckets.study import STUDY
from labkit.studies.gradient_buckets.worker import LOCAL, PROBE, STEPS
from tests.studies.answering import answers_of

_answers = partial(answers_of, STUDY)

MIB = 2**20
GRADIENTS = 1000 * MIB
BUCKETS = {1.0: 1000, 10.0: 100, 100.0: 10, 1000.0: 1}
TRUTH = AlphaBeta(1e-4, 1 / 10e9)
SETTINGS = [(batch, sequence) for batch in (2, 4) for sequence in (128, 256, 512)]


def _computing(batch, sequence):
    return 0.2 + 2e-4 * batch * sequence


def _overhead(bucket_mb, batch, sequence):
    """All but the last bucket hide."""
    return TRUTH.predict_s(bucket_overhead(BUCKETS[bucket_mb], GRADIENTS))


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

    machine = {"workload": "xl", "world_size": 2, "backend": "gloo", "device": "cpu", "gate": "ok"}
    for n_bytes in (4096, 100 * MIB):
        add(machine | {"sweep": PROBE, "n_bytes": n_bytes}, TRUTH.predict_s(MessageCost(1, n_bytes)))
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
    assert all(answer.verdict != "not measured" for answer in _answers(_frame()).values())


@pytest.mark.parametrize("frame", [pd.DataFrame(), _frame().iloc[:0]], ids=["no columns", "no rows"])
def test_without_rows_every_question_is_not_measured_and_says_why(frame):
    answers = _answers(frame, "needs 51 GiB, 22 GiB available")
    assert {answer.verdict for answer in answers.values()} == {"not measured"}
    assert all("needs 51 GiB" in answer.text for answer in answers.values())


def test_the_slowest_rank_counts_and_steps_are_compared_within_a_repeat():
    table = analysis.steps(_frame(noise=0))
    row = table[(table["batch"] == 2) & (table["sequence"] == 128) & (table["bucket_mb"] == 10)].iloc[0]
    waits = _overhead(10.0, 2, 128)
    assert row["waiting_s"] == pytest.approx(waits)
    assert row["exposed_s"] == pytest.approx(waits)
    assert row["contention_s"] == pytest.approx(0, abs=1e-12)
    assert row["waiting_percent"] == pytest.approx(100 * waits / (_computing(2, 128) + waits))


def test_a_textbook_machine_has_an_optimum_and_the_model_finds_it():
    answers = _answers(_frame())
    size = answers["bucket_size"]
    assert size.verdict == "yes"
    assert size.recommendation == "buckets of 10 MiB and 100 MiB, between which no difference is shown; " + (
        "1 MiB and 1000 MiB are shown to be slower."
    )
    found = answers["model"]
    assert found.verdict == "yes"
    constants = model.constants(_frame(noise=0)).set_index("model")
    assert constants["call_s"].to_list() == pytest.approx([TRUTH.alpha_s] * 2, rel=1e-3)
    assert constants["bandwidth_bytes_per_s"].to_list() == pytest.approx([10e9] * 2, rel=1e-3)
    assert constants.loc["fitted", "best_buckets"] == pytest.approx(best_buckets(GRADIENTS, TRUTH), rel=1e-3)
    assert answers["batch_and_length"].verdict == "yes"


def test_numbers_in_the_text_come_from_the_frame():
    text = _answers(_frame(lambda *_: 0.05, noise=0, settings=[(2, 128)]))["waiting"].text
    assert "1000 MiB of gradients" in text
    assert "with batch 2, sequence 128 a step takes 301 ms and waits for 50 ms of it (17 %)" in text
    assert "is 50 ms longer than one without communication" in text


def test_sizes_that_are_alike_do_not_matter():
    answers = _answers(_frame(lambda *_: 0.05, noise=0.005))
    assert answers["bucket_size"].verdict == "no difference shown"
    assert "it does not matter here: by all intervals" in answers["bucket_size"].recommendation
    assert answers["bucket_size"].is_shown
    assert answers["model"].verdict == "no"


def test_sizes_that_differ_by_less_than_the_noise_are_not_said_to_be_alike():
    answer = _answers(_frame(noise=0.3))["bucket_size"]
    assert answer.verdict == "no difference shown"
    assert answer.recommendation.startswith("keep the size you have: none is shown to be better")
    assert not answer.is_shown


def test_waiting_that_is_only_moved_into_backward_is_no_gain():
    """Small buckets wait less, and the backward pass beside them is as much slower."""
    all_bytes = GRADIENTS * TRUTH.beta_s_per_byte

    def waits(size, *_):
        return all_bytes * size / 1000

    frame = _frame(waits, lambda size, *_: all_bytes - waits(size))
    answers = _answers(frame)
    assert answers["bucket_size"].verdict == "no difference shown"
    assert "What a step does not wait for, its backward pass pays" in answers["bucket_size"].text
    assert "slow down the backward pass" in answers["waiting"].text


def test_a_rank_that_waits_for_a_slower_one_is_told_from_communication():
    text = _answers(_frame(lambda *_: 0.08, lambda *_: -0.05))["waiting"].text
    (less,) = re.findall(r"that is ([\d.]+)(?: ms)? to ([\d.]+) ms less than the waiting, which is partly", text)
    assert [float(number) for number in less] == pytest.approx([50, 50], abs=1)


def test_a_machine_that_contradicts_the_model_is_not_talked_round():
    """One bucket waits least here, and the most calls most."""

    def contrary(size, *_):
        return 0.01 * BUCKETS[size] ** 0.5

    answers = _answers(_frame(contrary))
    assert answers["model"].verdict in ("no", "mixed")
    assert "buckets of 1000 MiB" in answers["bucket_size"].recommendation
    assert ": contradicted here" in answers["published_trends"].text


def test_a_share_that_rises_with_the_sequence_is_said_to():
    answer = _answers(_frame(lambda size, batch, sequence: 0.001 * (batch * sequence) ** 1.0))["batch_and_length"]
    assert answer.verdict == "no"


@pytest.mark.parametrize("slow", [1.0, 10.0, 100.0])
def test_one_setting_is_enough_to_see_a_size_that_is_far_slower(slow):
    frame = _frame(lambda size, *_: 34 * 0.3 if size == slow else 0.01, sizes=(1.0, 10.0, 100.0), settings=[(2, 128)])
    answer = _answers(frame)["bucket_size"]
    assert answer.verdict == "yes"
    assert answer.recommendation.endswith(f"{slow:.0f} MiB is shown to be slower.")


@pytest.mark.parametrize(
    ("call_s", "bandwidth", "what", "best"),
    [
        (0.0, 10e9, "calls cost nothing and w = 10 GB/s", "as many buckets as there can be"),
        (1e-4, np.inf, "o = 100 µs and bytes cost nothing", "a single bucket"),
        (0.0, np.inf, "neither calls nor bytes cost anything", "any number of buckets"),
    ],
)
def test_a_fit_with_one_constant_is_put_in_words(call_s, bandwidth, what, best):
    row = {"call_s": call_s, "bandwidth_bytes_per_s": bandwidth, "best_buckets": 1.0, "best_bucket_bytes": 1.0}
    assert model.costs_and_best(row) == (what, best)


def test_waiting_that_depends_on_bytes_alone_fits_no_infinite_number_of_buckets():
    frame = _frame(lambda size, *_: GRADIENTS / BUCKETS[size] / 10e9, noise=0)
    text = _answers(frame)["model"].text
    assert "inf" not in text
    assert "as many buckets as there can be" in text


def test_too_few_repeats_claim_nothing():
    answers = _answers(_frame(repeats=3))
    assert answers["bucket_size"].verdict == "no difference shown"
    assert "Too few repeats" in answers["bucket_size"].text
    assert answers["batch_and_length"].verdict == "no difference shown"


def test_two_numbers_of_buckets_do_not_test_two_constants():
    answer = _answers(_frame(sizes=(1.0, 100.0)))["model"]
    assert answer.verdict == "measured"
    assert "Fewer than three numbers of buckets" in answer.text


@pytest.mark.parametrize("missing", [PROBE, LOCAL, "waiting", "one size", "one setting"])
def test_with_rows_missing_every_question_still_has_an_answer(missing):
    frame = _frame()
    kept = {
        PROBE: frame["sweep"] != PROBE,
        LOCAL: frame["alternative"] != LOCAL,
        "waiting": frame["phase"] != "waiting",
        "one size": frame["bucket_mb"].isna() | (frame["bucket_mb"] == 10),
        "one setting": frame["batch"].isna() | ((frame["batch"] == 2) & (frame["sequence"] == 128)),
    }[missing]
    answers = _answers(frame[kept])
    assert set(answers) == {question.id for question in STUDY.questions}
    if missing == "one size":
        assert answers["bucket_size"].verdict == "not measured"
    if missing == "one setting":
        assert answers["batch_and_length"].verdict == "not measured"


def test_wrong_gradients_are_shouted():
    frame = _frame()
    bad = {"sweep": STEPS, "alternative": "1 MiB", "gate": "wrong: error 5.0e-01, at most 1.0e-03 expected"}
    assert _answers(pd.concat([frame, pd.DataFrame([bad])]))["waiting"].text.startswith("WRONG GRADIENTS")
    alone = _answers(pd.DataFrame([bad | {"workload": "xl"}]))["waiting"]
    assert alone.verdict == "not measured"
    assert "1 MiB" in alone.text


def test_the_published_trends_hold_in_the_published_numbers():
    """Fed to the lab as if measured, they show what is claimed of them."""
    table = analysis.published().set_index(["bucket_mb", "batch", "sequence"])

    def of(column):
        return lambda *key: float(table.loc[key, column])

    frame = _frame(
        of("waiting_s"),
        lambda *key: of("step_s")(*key) - of("waiting_s")(*key) - _computing(*key[1:]),
        noise=0.0005,
    )
    assert analysis.spread(frame)["spread_percent"].max() < 4
    text = _answers(frame)["published_trends"].text
    assert text.count("contradicted") == 0
    assert "Buckets of 1000 MiB are waited for longer" not in text  # one bucket here: no question
