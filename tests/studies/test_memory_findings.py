"""Findings of the memory lab on made-up frames: textbook, contrary, noisy, and with rows missing."""

from functools import partial

import numpy as np
import pandas as pd
import pytest

from labkit.costs.memory import PHASES, peak_bytes, residual_stream_bytes, saved_by_layer, state_bytes
from labkit.lab.project import recorded_directory
from labkit.lab.runs.store import Run
from labkit.nn.transformer import shape_named
from labkit.studies.memory import tables
from labkit.studies.memory.counting import PARTS
from labkit.studies.memory.study import STUDY
from tests.studies.answering import answers_of

_findings = partial(answers_of, STUDY)

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
            about = {"table": "checkpoint", "segment": segment, "repeat": repeat, "check": "ok"}
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
    findings = _findings(_frame())
    assert all(finding.verdict != "not measured" for finding in findings.values())
    for name in ("counted_against_measured", "residual_stream", "saved_by_a_block", "checkpointing"):
        assert findings[name].verdict == "yes"


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
def test_a_missing_table_silences_the_findings_that_need_it_and_no_other(table, silent):
    frame = _frame()
    findings = _findings(frame[frame["table"] != table])
    assert {name for name, finding in findings.items() if finding.verdict == "not measured"} == silent


def test_what_counting_costs_is_told_of_the_largest_step():
    why = _findings(_frame())["counted_against_measured"].why
    assert "2.7B with a peak of 168 GiB, took 1.68 s and 168 MiB of main memory" in why
    assert _findings(_frame().drop(columns="host_bytes"))["counted_against_measured"].why.endswith("took 1.68 s.")


def test_counted_alone_answers_what_it_can():
    frame = _frame()
    findings = _findings(frame[(frame["table"] == "peak") & (frame["method"] == "counted")])
    assert findings["counted_against_measured"].verdict == "not measured"
    assert findings["largest_model"].verdict == "counted"
    assert set(findings["peak_by_context"].table["method"]) == {"counted"}
    assert findings["peak_by_context"].verdict == "counted"


def test_what_is_measured_stands_before_what_is_counted():
    table = tables.phases(_frame(counted=1.2), "mini", "2.7B")
    assert dict(zip(table["size"], table["method"], strict=True)) == {"mini": "measured", "2.7B": "counted"}
    mini = table[(table["size"] == "mini") & (table["precision"] == "float32")]
    assert mini["full_step_bytes"].tolist() == [_peak("mini", n, "float32", "full_step") for n in (64, 128, 256)]


@pytest.mark.parametrize(("off", "verdict"), [(1.04, "yes"), (1.06, "no"), (1.2, "no")])
def test_counting_that_is_off_is_a_no(off, verdict):
    assert _findings(_frame(counted=off))["counted_against_measured"].verdict == verdict


@pytest.mark.parametrize(("off", "of_block", "of_stream"), [(1.04, "yes", "no"), (1.5, "no", "no")])
def test_a_block_that_keeps_something_else_than_predicted_is_a_no(off, of_block, of_stream):
    findings = _findings(_frame(saved=off))
    assert findings["saved_by_a_block"].verdict == of_block
    assert findings["residual_stream"].verdict == of_stream


def test_the_largest_model_is_the_largest_that_fits():
    for machine, size in ((24 * GIB, "small"), (200 * GIB, "2.7B")):
        found = _findings(_frame(machine=machine))["largest_model"]
        assert found.advice == f"Train models of up to the size {size} (batch 4, 128 tokens)."
        assert found.headline.endswith(f"of {machine // GIB} GiB.")
        assert found.where.startswith("batch 4 · 128 tokens · float32 · AdamW")
    none = _findings(_frame(machine=GIB // 4))["largest_model"]
    assert (none.verdict, none.advice, none.significant) == ("no", None, False)


def test_checkpointing_that_saves_nothing_is_not_recommended():
    found = _findings(_frame(lambda *setting: 1e9))["checkpointing"]
    assert (found.verdict, found.advice) == ("no clear difference", "Keep all activations.")
    assert {effect.verdict for effect in found.effects if effect.quantity == "memory"} == {"no difference shown"}


def test_checkpointing_that_takes_memory_is_a_no():
    found = _findings(_frame(lambda *setting: 2e9 if setting[4:] > (0,) else 1e9))["checkpointing"]
    assert (found.verdict, found.advice) == ("no", "Keep all activations.")


def test_the_best_segment_is_where_the_peak_is_lowest_whatever_the_textbook_says():
    def contrary(size, context, precision, phase, segment=0):
        return {0: 10e9, 1: 9e9, 2: 8e9, 3: 5e9, 6: 9e9}[segment]

    found = _findings(_frame(contrary))["checkpointing"]
    assert (
        found.headline
        == "Yes: with mini, checkpointing every 3 layers needs 2 times less memory than no checkpointing."
    )
    assert found.advice == "If memory is short, checkpoint every 3 layers."
    best = tables.best_segments(_frame(contrary)).iloc[0]
    assert (best["segment"], best["root_of_layers"]) == (3, pytest.approx(6**0.5))
    assert best["predicted_segment"] == 1  # no segment is shorter than a layer
    assert best["highest_over_lowest"] == pytest.approx(9 / 5)


def test_a_sentence_speaks_of_one_model_and_names_it():
    frame = pd.concat([_frame(), _frame().replace({"size": {"mini": "small"}})], ignore_index=True)
    found = _findings(frame)
    for name, largest in (("where_it_goes", "2.7B"), ("checkpointing", "small")):
        sentences = [found[name].headline, found[name].also or found[name].why]
        assert all(sum(size in told for size in ("mini", "small", "2.7B")) == 1 for told in sentences)
        assert largest in found[name].headline


def test_what_checkpointing_saves_is_also_told_of_the_model_that_was_timed():
    frame = pd.concat([_frame(), _frame().replace({"size": {"mini": "small"}})], ignore_index=True)
    untimed = (frame["size"] == "small") & (frame["table"] == "checkpoint")
    found = _findings(frame.assign(seconds=frame["seconds"].where(~untimed)))["checkpointing"]
    assert "with small" in found.headline
    assert "With mini, checkpointing takes" in found.also
    ratios = tables.segment_peaks(frame).query("size == 'mini'")["ratio"]
    least, most = (f"{100 * (1 - ratio):.0f}" for ratio in (ratios.max(), ratios.min()))
    assert found.also.endswith(f"It saves {least} to {most} % of mini's memory; small was not timed.")
    assert found.where.endswith("timed: mini · 256 tokens")


def test_a_cost_without_peaks_is_told():
    frame = _frame()
    failed = (frame["table"] == "checkpoint") & (frame["segment"] == 2)
    frame.loc[failed, ["check", "seconds"]] = ["wrong: 1", np.nan]
    frame = frame.assign(peak_bytes=frame["peak_bytes"].mask(frame["table"] == "checkpoint"), counted_bytes=np.nan)
    assert _findings(frame)["checkpointing"].caveat.startswith("WRONG RESULTS")


def test_a_peak_of_which_a_half_is_counted_is_not_called_measured():
    frame = _frame()
    short = frame["context_length"].isin([64, 128]) | (frame["method"] != "measured") | (frame["table"] != "peak")
    found = _findings(frame[short])["peak_by_context"]
    assert found.verdict == "counted"
    assert found.where.startswith("64 tokens (measured) and 256 tokens (counted)")
    assert _findings(frame)["peak_by_context"].verdict == "measured"


def test_what_autocast_changes_at_the_peak_is_computed_from_both_precisions():
    def peak(size, context, precision, phase, segment=0):
        low = precision == "bfloat16"
        changed = 1.5 if phase == "inference" else 0.9 if context > 64 else 1.0
        return 1e9 * (changed if low else 1)

    why = _findings(_frame(peak))["peak_by_context"].why
    assert "Inference of mini under bfloat16 autocast needs 50 % more memory than in float32" in why
    assert "In most settings: a full step of mini under bfloat16 autocast needs 10 % less memory than in float32" in why


def test_a_measured_setting_is_not_compared_a_second_time_as_counted():
    settings = [e.setting for e in _findings(_frame())["checkpointing"].effects if e.quantity == "memory"]
    assert len(settings) == 4
    assert all("measured" in setting for setting in settings)


@pytest.mark.parametrize(
    ("changes", "verdicts"),
    [
        ({}, {"slower"}),
        ({"noise": 1.0}, {"no difference shown"}),
        ({"repeats": 3}, {"no difference shown"}),
        ({"seconds": lambda segment, _: 0.5 if segment else 1}, {"faster"}),
    ],
)
def test_the_time_of_checkpointing_is_claimed_where_it_is_significant(changes, verdicts):
    found = _findings(_frame(**changes))["checkpointing"]
    assert {effect.verdict for effect in found.effects if effect.quantity == "time"} == verdicts
    assert found.also
    assert found.table["time_ratio"].notna().sum() == 4


def test_wrong_gradients_are_shouted():
    frame = _frame()
    frame.loc[(frame["table"] == "checkpoint") & (frame["segment"] == 2), ["check", "seconds"]] = ["wrong: 1", np.nan]
    caveat = _findings(frame)["checkpointing"].caveat
    assert caveat.startswith("WRONG RESULTS, and so no times, from checkpointing every 2 layers")


def test_published_trends_hold_or_are_contradicted():
    def published(size, context, precision, phase, segment=0):
        low = 0.86 if precision == "bfloat16" else 1
        return (20e9 + 1e7 * context + 1e5 * context**2) * low * (0.93 if phase == "inference" else 1)

    def outcomes(frame):
        return {claim.outcome for claim in _findings(frame)["published_trends"].claims}

    assert outcomes(_frame(published)) == {"holds here"}
    reverse = _frame(lambda s, context, p, phase, segment=0: 1e12 / context * (0.1 + (phase != "inference")))
    assert outcomes(reverse) == {"is contradicted here", "is not shown here"}


def test_a_published_peak_below_the_states_is_pointed_out_and_only_then():
    assert "more than the 22.8 GiB published" in _findings(_frame())["published_peaks"].why
    frame = _frame()
    frame = frame[(frame["context_length"] != 128) & (frame["context_length"] != 256)]
    why = _findings(frame)["published_peaks"].why
    assert "AdamW's states alone" not in why
    assert why.startswith("Inference needs ")


def test_where_no_checkpointing_runs_out_of_memory_what_is_counted_is_compared():
    frame = _frame()
    without = (frame["table"] == "checkpoint") & (frame["segment"] == 0)
    frame.loc[without, ["check", "seconds", "peak_bytes"]] = ["out of memory: 20 GiB", np.nan, np.nan]
    found = _findings(frame)["checkpointing"]
    assert found.verdict == "yes"
    assert "out of memory" in found.caveat.lower()
    assert set(tables.segment_peaks(frame)["method"]) == {"counted"}


def test_the_parts_of_a_small_model_add_up_beside_those_of_a_large_one():
    """Its gradients, a quarter of its own peak, are little beside the large one's activations."""
    frame = Run.load(next(recorded_directory().glob("memory/*.jsonl"))).frame()
    lengths = frame["context_length"].where(frame["size"] == "2.7B")
    parts = tables.shares(frame[~(lengths < 512)]).filter(like="_percent")
    assert parts.sum(axis=1).to_numpy() == pytest.approx(100, abs=1)
