"""Answers of the memory lab on made-up frames: textbook, contrary, noisy, and with rows missing."""

from functools import partial

import numpy as np
import pandas as pd
import pytest

from labkit.costs.memory import PHASES, peak_bytes, residual_stream_bytes, saved_by_layer, state_bytes
from labkit.nn.transformer import shape_named
from labkit.studies.memory.counting import PARTS
from labkit.studies.memory.study import STUDY
from tests.studies.answering import answers_of

_answers = partial(answers_of, STUDY)

GIB = 2**30
SETTINGS = [
    *(("mini", context, precision) for context in (64, 128, 256) for precision in ("float32", "bfloat16")),
    *(("2.7B", context, "float32") for context in (128, 256, 512, 2048)),
    ("2.7B", 512, "bfloat16"),
    ("small", 128, "float32"),
]


def _peak(size, context, precision, phase, segment=0):
    return peak_bytes(shape_named(size), 4, context, phase=phase, precision=precision, checkpoint_segment=segment)


def _frame(peak=_peak, *, counted=1.0, seconds=None, noise=0.02, repeats=8, machine=24 * GIB, saved=1.0, seed=0):
    """Rows as a run would have them; `counted` is what counting gives of the measured peak."""
    generator = np.random.default_rng(seed)
    rows = []
    for size, context, precision in SETTINGS:
        point = {"size": size, "context_length": context, "precision": precision, "batch": 4, "machine_bytes": machine}
        point |= {"checkpoint_segment": 0, "table": "peak"}
        for phase in PHASES:
            n = peak(size, context, precision, phase)
            states = state_bytes(shape_named(size))
            parts = dict.fromkeys((f"{part}_bytes" for part in PARTS), 0)
            parts |= {"parameters_bytes": states["parameters"], "activations_bytes": n - states["parameters"]}
            about = point | {"phase": phase, "predicted_bytes": _peak(size, context, precision, phase)}
            cost = {"count_s": n / GIB / 100, "host_bytes": n / 1024}
            rows.append(about | parts | cost | {"method": "counted", "peak_bytes": n * counted})
            if size == "mini":
                rows += [about | {"method": "measured", "peak_bytes": n, "repeat": r} for r in range(2)]
    return pd.DataFrame(rows + _others(peak, seconds, generator, noise, repeats, saved))


def _others(peak, seconds, generator, noise, repeats, saved):
    rows = []
    base = {"size": "mini", "context_length": 256, "precision": "float32", "batch": 4}
    for segment in (0, 1, 2, 3, 6):
        n = peak("mini", 256, "float32", "full_step", segment)
        time = 1.3 if segment else 1.0
        for repeat in range(repeats):
            measured = (seconds or (lambda _, t: t))(segment, time) * np.exp(generator.normal(0, noise))
            about = {"table": "checkpoint", "segment": segment, "repeat": repeat, "gate": "ok"}
            rows.append(base | about | {"peak_bytes": n, "counted_bytes": n, "seconds": measured})
    shape = shape_named("mini")
    for name, n in saved_by_layer(shape, 4, 256).items():
        rows.append(base | {"table": "saved", "operator": name, "n_bytes": n})
    total = sum(saved_by_layer(shape, 4, 256).values())
    stream = residual_stream_bytes(shape, 4, 256)
    block = {"saved_bytes": total * saved, "predicted_bytes": total, "residual_bytes": stream * saved}
    block |= {"predicted_residual_bytes": stream, "parameter_gradients_bytes": 1, "input_gradient_bytes": stream}
    rows.append(base | {"table": "block"} | block)
    event = {"operator": "_softmax", "line": "attention.py:97", "part_of_step": "forward", "category": "activations"}
    rows.append(base | {"table": "allocation", "n_bytes": 2**20, "times": 6, "at_peak_bytes": 6 * 2**20} | event)
    live = {f"{part}_bytes": 1 for part in PARTS}
    rows += [base | {"table": "timeline", "moment": m, "part_of_step": "forward"} | live for m in range(3)]
    return rows


def test_every_question_is_answered_from_a_full_frame():
    answers = _answers(_frame())
    assert all(answer.verdict != "not measured" for answer in answers.values())
    assert answers["counted_against_measured"].verdict == "yes"
    assert answers["residual_stream"].verdict == answers["saved_by_a_block"].verdict == "yes"


@pytest.mark.parametrize("frame", [pd.DataFrame(), _frame().iloc[:0]], ids=["no columns", "no rows"])
def test_without_rows_every_question_is_not_measured_and_says_why(frame):
    answers = _answers(frame, "needs 51 GiB (predicted), 22 GiB available")
    assert {answer.verdict for answer in answers.values()} == {"not measured"}
    assert all("needs 51 GiB" in answer.text for answer in answers.values())


OF_PEAKS = {"peak_by_context", "where_it_goes", "largest_model", "counted_against_measured"}


@pytest.mark.parametrize(
    ("table", "silent"),
    [
        ("peak", OF_PEAKS | {"published_peaks", "published_trends"}),
        ("checkpoint", {"checkpointing"}),
        ("saved", set()),
        ("block", {"residual_stream", "saved_by_a_block"}),
        ("allocation", {"largest_allocations"}),
        ("timeline", set()),
    ],
)
def test_a_missing_table_silences_the_answers_that_need_it_and_no_other(table, silent):
    frame = _frame()
    answers = _answers(frame[frame["table"] != table])
    assert {name for name, answer in answers.items() if answer.verdict == "not measured"} == silent


def test_what_counting_costs_is_told_of_the_largest_step():
    text = _answers(_frame())["counted_against_measured"].text
    assert "Counting the largest, 2.7B at 2048 tokens with a peak of 168 GiB, took 1.68 s and 168 MiB of main" in text
    unknown = _answers(_frame().drop(columns="host_bytes"))["counted_against_measured"].text
    assert unknown.endswith("took 1.68 s.")


def test_counted_alone_answers_what_it_can():
    frame = _frame()
    answers = _answers(frame[(frame["table"] == "peak") & (frame["method"] == "counted")])
    assert answers["counted_against_measured"].verdict == "not measured"
    assert answers["largest_model"].verdict == "measured"
    assert "(measured)" not in answers["peak_by_context"].text


def test_counting_that_is_off_is_a_no():
    answer = _answers(_frame(counted=1.2))["counted_against_measured"]
    assert answer.verdict == "no"
    assert "In 0 of" in answer.text
    assert "20 %" in answer.text


def test_a_block_that_keeps_something_else_than_predicted_is_a_no():
    answers = _answers(_frame(saved=1.5))
    assert answers["saved_by_a_block"].verdict == answers["residual_stream"].verdict == "no"


def test_the_largest_model_is_the_largest_that_fits():
    for machine, size in ((24 * GIB, "small"), (200 * GIB, "2.7B")):
        advice = _answers(_frame(machine=machine))["largest_model"].recommendation
        assert advice.startswith(
            f"up to the size {size}, a full step fits into the {machine // GIB} GiB of this machine"
        )
    none = _answers(_frame(machine=GIB // 4))["largest_model"]
    assert (none.verdict, none.recommendation) == ("no", None)


def test_checkpointing_that_saves_nothing_is_not_recommended():
    answer = _answers(_frame(lambda *setting: 1e9))["checkpointing"]
    assert answer.verdict == "no"
    assert answer.recommendation is None
    assert "no segment length lowers the peak" in answer.text


def test_the_best_segment_is_where_the_peak_is_lowest_whatever_the_textbook_says():
    def contrary(size, context, precision, phase, segment=0):
        return {0: 10e9, 1: 9e9, 2: 8e9, 3: 5e9, 6: 9e9}[segment]

    answer = _answers(_frame(contrary))["checkpointing"]
    assert "lowest with segments of 3; the length predicted from what a layer keeps here is " in answer.text
    assert "(the textbook's sqrt(layers): " in answer.text
    assert "checkpoint every 3 layers: 50 % of the peak" in answer.recommendation


def test_the_time_of_checkpointing_is_told_with_its_interval_or_not_at_all():
    assert "1.3" in _answers(_frame())["checkpointing"].text
    assert "no difference beyond chance" in _answers(_frame(noise=1.0))["checkpointing"].text
    assert "no difference beyond chance" in _answers(_frame(repeats=3))["checkpointing"].text
    assert "to 0.5" in _answers(_frame(seconds=lambda segment, _: 0.5 if segment else 1))["checkpointing"].text


def test_published_trends_hold_or_are_contradicted():
    def published(size, context, precision, phase, segment=0):
        low = 0.86 if precision == "bfloat16" else 1
        return (20e9 + 1e7 * context + 1e5 * context**2) * low * (0.93 if phase == "inference" else 1)

    held = _answers(_frame(published))["published_trends"]
    assert held.verdict == "yes", held.text
    reverse = _answers(_frame(lambda s, context, p, phase, segment=0: 1e12 / context * (0.1 + (phase != "inference"))))
    assert reverse["published_trends"].verdict == "no", reverse["published_trends"].text


def test_a_published_peak_below_the_states_is_pointed_out_and_only_then():
    assert "more than the 22.8 GiB (24.5 GB) published at 128 tokens" in _answers(_frame())["published_peaks"].text
    frame = _frame()
    frame = frame[(frame["context_length"] != 128) & (frame["context_length"] != 256)]
    text = _answers(frame)["published_peaks"].text
    assert "two states alone" not in text
    assert "times what a forward pass needs that keeps nothing" in text


def test_the_question_ids_are_the_published_ones():
    assert [question.id for question in STUDY.questions] == [
        "peak_by_context",
        "where_it_goes",
        "residual_stream",
        "largest_allocations",
        "saved_by_a_block",
        "checkpointing",
        "largest_model",
        "counted_against_measured",
        "published_peaks",
        "published_trends",
    ]
