"""Answers of the attention lab on made-up frames: textbook, contrary, noisy, and with rows missing."""

from functools import partial

import numpy as np
import pandas as pd
import pytest

from labkit.costs.attention import explicit_peak, explicit_saved, tiled_saved
from labkit.studies.attention import analysis
from labkit.studies.attention.study import STUDY
from tests.studies.answering import answers_of

_answers = partial(answers_of, STUDY)

GIB = 2**30
SEQUENCES, HEAD_DIMS = (256, 1024, 2048, 4096), (16, 64)


def _textbook(name, phase, sequence, head_dim):
    """A fixed cost and s^2 numbers that are touched, some of them d times; compiling is slow at first."""
    factor = {"explicit": 1.0, "tiled": 0.5, "compiled": 2.0 if sequence < 1024 else 0.8}[name]
    return 1e-9 * sequence**2 * (50 + head_dim) * factor * (1 if phase == "forward" else 2)


def _frame(seconds=_textbook, *, noise=0.01, repeats=12, gate="ok", available=20 * GIB, saved=1.0, seed=0):
    generator = np.random.default_rng(seed)
    settings = [("grid", 8, s, d) for s in SEQUENCES for d in HEAD_DIMS]
    settings += [("tiling", 1, s, 64) for s in (4096, 16384)]
    rows = []
    for sweep, batch, sequence, head_dim in settings:
        names = ("explicit", "tiled", "compiled") if sweep == "grid" else ("explicit", "tiled")
        base = {"sweep": sweep, "device": "cpu", "dtype": "float32", "batch": batch}
        base |= {"sequence": sequence, "head_dim": head_dim, "rank": 0, "gate": gate}
        for name in names:
            rows += _memory_rows(base | {"implementation": name}, available, saved)
            for repeat in range(repeats):
                for phase in ("forward", "backward"):
                    time = seconds(name, phase, sequence, head_dim) * np.exp(generator.normal(0, noise))
                    rows.append(base | {"implementation": name, "phase": phase, "repeat": repeat, "seconds": time})
    return pd.DataFrame(rows)


def _memory_rows(base, available, factor):
    size = base["batch"], base["sequence"], base["head_dim"], 4
    tiled = base["implementation"] == "tiled"
    tensors = tiled_saved(*size) if tiled else explicit_saved(*size, causal=False)
    peak = sum(tensors.values()) if tiled else sum(explicit_peak(*size, causal=False).values())
    first = {"first_call_s": 7.0} if base["implementation"] == "compiled" else {}
    yield base | {"phase": "both", "error": 1e-7, "peak_bytes": peak, "available_bytes": available} | first
    for name, n_bytes in tensors.items():
        yield base | {"phase": "saved", "tensor": name, "saved_bytes": n_bytes * factor}


def test_the_question_ids_are_the_published_ones():
    ids = [question.id for question in STUDY.questions]
    assert ids == ["time_growth", "memory_growth", "out_of_memory", "tiling", "compiled", "published_trends"]


def test_every_question_is_answered_from_a_full_frame():
    assert all(answer.verdict != "not measured" for answer in _answers(_frame()).values())


@pytest.mark.parametrize("frame", [pd.DataFrame(), _frame().iloc[:0]], ids=["no columns", "no rows"])
def test_without_rows_every_question_is_not_measured_and_says_why(frame):
    answers = _answers(frame, "needs 51 GiB, 22 GiB available")
    assert {answer.verdict for answer in answers.values()} == {"not measured"}
    assert all("needs 51 GiB" in answer.text for answer in answers.values())


def test_the_exponent_of_a_textbook_machine_is_two_over_all_lengths():
    laws = analysis.power_laws(_frame()).query("implementation != 'compiled'")
    assert laws["exponent"].tolist() == pytest.approx([2.0] * len(laws), abs=0.02)
    assert set(laws["from_sequence"]) == {256}
    assert (laws["low"] < 2.01).all()
    assert (laws["high"] > 1.99).all()


def test_a_range_begins_where_the_power_law_does():
    """A fixed cost, as of launching a kernel, hides the growth of short sequences."""
    frame = _frame(lambda name, phase, s, d: 5e-4 + 1e-9 * s**2, noise=0.001)
    laws = analysis.power_laws(frame)
    assert set(laws["from_sequence"]) == {1024}
    assert laws["exponent"].between(1.5, 2.0).all()


def test_times_that_follow_no_power_law_are_not_given_an_exponent():
    frame = _frame(lambda name, phase, s, d: 1e-3 * (1 if s in (256, 2048) else 30))
    assert analysis.power_laws(frame).empty
    assert "over no range of lengths" in _answers(frame)["time_growth"].text


def test_numbers_in_the_text_come_from_the_frame():
    text = _answers(_frame(lambda name, phase, s, d: 1e-6 * s, noise=0))["time_growth"].text
    assert "Forward takes 4.1 ms [4.1 ms, 4.1 ms] at 4096 tokens and head dimension 64" in text
    assert "power of 1.00 [1.00, 1.00] from 256 to 4096 tokens" in text
    assert "takes 1.00 [1.00, 1.00] times as long, which is not shown to be more" in text


def test_memory_as_predicted_is_a_yes_and_other_memory_is_a_no():
    yes = _answers(_frame())["memory_growth"]
    assert yes.verdict == "yes"
    assert "measured over predicted is 1.00." in yes.text
    no = _answers(_frame(saved=2.0))["memory_growth"]
    assert no.verdict == "no"
    assert "measured over predicted is 2.00." in no.text


def test_the_end_of_memory_follows_from_what_is_available():
    answer = _answers(_frame())["out_of_memory"]
    assert "16384 tokens is the first power of two that does not fit" in answer.text
    assert "3 matrices of 8 GiB" in answer.text
    more = _answers(_frame(available=200 * GIB))["out_of_memory"]
    assert "65536 tokens" in more.text
    table = analysis.accounting(_frame()).set_index("tensor")
    assert table.loc["probabilities", "bytes"] == 8 * GIB
    assert table.loc["all together", "bytes"] == table["bytes"].iloc[:-2].sum()


def test_tiling_that_is_faster_is_recommended_and_one_that_is_not_is_not():
    fast = _answers(_frame())["tiling"]
    assert "from 4096 tokens on" in fast.recommendation
    assert "times as much" in fast.text
    slow = _answers(_frame(lambda name, *rest: (2 if name == "tiled" else 1) * 1e-3))["tiling"]
    assert slow.recommendation is None
    assert "(slower)" in slow.text


def _tiling_rows(ratios, peaks=(1, 8)):
    """Rows of the tiling sweep alone: time of tiled over explicit by length; peaks of tiled and explicit in GiB."""
    frame = _frame(lambda *_: 1e-3)
    at = frame[(frame["sweep"] == "tiling") & (frame["sequence"] == 4096)]
    tiled = at["implementation"] == "tiled"
    at = at.assign(peak_bytes=at["peak_bytes"].where(at["peak_bytes"].isna(), np.where(tiled, *peaks) * GIB))
    return pd.concat(
        [at.assign(sequence=s, seconds=at["seconds"] * np.where(tiled, ratio, 1.0)) for s, ratio in ratios.items()]
    )


def test_tiling_is_recommended_from_where_every_longer_sequence_gains():
    gap = _answers(_tiling_rows({4096: 0.5, 8192: 1.0, 16384: 0.6}))["tiling"]
    assert (
        gap.recommendation
        == "tile instead of building the matrix from 16384 tokens on: less memory, and 0.60 of the time."
    )
    slow = _answers(_tiling_rows({4096: 2.0, 8192: 0.5, 16384: 0.6}))["tiling"]
    assert "from 8192 tokens on: less memory, and 0.50 to 0.60 of the time." in slow.recommendation
    late = _answers(_tiling_rows({4096: 0.5, 8192: 0.5, 16384: 1.0}))["tiling"]
    assert late.recommendation is None


def test_tiling_that_takes_more_memory_is_not_said_to_take_less():
    answer = _answers(_tiling_rows({4096: 0.5, 8192: 0.5}, peaks=(9, 8)))["tiling"]
    assert answer.recommendation == "tile instead of building the matrix from 4096 tokens on: 0.50 of the time."


def test_memory_only_is_an_answer_without_times():
    frame = _frame()
    answer = _answers(frame[(frame["sweep"] == "grid") | frame["phase"].isin(["both", "saved"])])["tiling"]
    assert "at 16384 tokens" in answer.text
    assert "Time" not in answer.text


def test_compiling_that_helps_long_sequences_only_is_mixed():
    answer = _answers(_frame())["compiled"]
    assert answer.verdict == "mixed"
    assert "from 1024 tokens on" in answer.recommendation
    assert "the first shape took 7 s" in answer.text


def test_compiling_that_changes_nothing_but_noise_shows_no_difference():
    answer = _answers(_frame(lambda *_: 1e-3, noise=0.3))["compiled"]
    assert answer.verdict == "no difference shown"
    assert answer.recommendation is None
    assert not answer.is_shown


def test_without_a_compiler_the_reason_is_told():
    frame = _frame()
    compiled = frame["implementation"] == "compiled"
    frame = frame[~compiled | (frame["phase"] == "both")].copy()
    frame.loc[frame["implementation"] == "compiled", "gate"] = "there is no compiler"
    answer = _answers(frame)["compiled"]
    assert answer.verdict == "not measured"
    assert "compiled: there is no compiler" in answer.text


def test_published_trends_hold_are_contradicted_or_not_shown():
    held = _answers(_frame())["published_trends"]
    assert held.verdict == "yes", held.text

    def reverse(name, phase, s, d):
        return 1e-6 * s * (0.5 if phase == "backward" else 1) * (1 if name == "explicit" else 0.5 if s < 1024 else 3)

    assert _answers(_frame(reverse))["published_trends"].verdict == "no"
    few = _answers(_frame(repeats=3))["published_trends"]
    assert few.verdict == "not shown", few.text


def test_few_repeats_claim_nothing():
    answers = _answers(_frame(repeats=3))
    assert answers["compiled"].verdict == "no difference shown"
    assert answers["tiling"].recommendation is None
    assert "too few repeats" in answers["time_growth"].text


def test_the_published_memory_is_two_matrices_at_long_sequences():
    table = analysis.published_memory()
    assert table.loc[table["sequence"] == 16384, "matrices"].between(1.9, 2.1).all()
