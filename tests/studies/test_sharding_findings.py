"""Findings of the sharding lab on made-up frames: textbook, contrary, noisy."""

from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd
import pytest

from labkit.costs.sharding import PARTS, STAGES, moved_bytes, state_bytes
from labkit.costs.transformer import SIZES, n_parameters
from labkit.lab.point import by_ranks
from labkit.machine import describe_machine
from labkit.studies.sharding import predicting, tables
from labkit.studies.sharding.study import STUDY
from labkit.studies.sharding.worker import GATHER
from tests import calibrated
from tests.studies.answering import answers_of, check_headline

_findings = partial(answers_of, STUDY)
MACHINE = calibrated.made_up()


@pytest.fixture
def cpu():
    return describe_machine().model_copy(update={"gpus": []})


N = n_parameters(SIZES["mini"])
BASE = {"size": "mini", "batch": 1, "context_length": 32, "world_size": 2, "device": "cpu", "backend": "gloo"}
# Seconds of the optimizer's part, with its gather; forward and backward take 100 ms everywhere.
TEXTBOOK = {"ddp": 0.06, "zero1": 0.04, "zero2": 0.04, "zero3": 0.09}


def _frame(optimizer=TEXTBOOK, *, noise=0.002, gather_s=0.01, peaks=1.05, sent=1.0, repeats=10, torch_factor=2.0):
    generator = np.random.default_rng(0)
    rows = []

    def add(way, part, seconds, **fields):
        for repeat in range(repeats):
            rows.append(
                BASE
                | {"kind": "time", "transport": "shared", "way": way, "part": part, "rank": 0, "repeat": repeat}
                | {"check": "ok", "seconds": seconds * np.exp(generator.normal(0, noise))}
                | fields
            )

    for way, seconds in optimizer.items():
        names = [(way, 1.0)] + ([(f"torch_{way}", torch_factor)] if way != "zero2" else [])
        for name, factor in names:
            for part, of_part in (("forward", 0.03), ("backward", 0.07), ("optimizer", seconds)):
                add(name, part, factor * of_part)
        for collective, moved in moved_bytes(4 * N, way, replicated_bytes=4 * 1000).items():
            formula = moved / 2 * (2 if collective == "all_reduce" else 1)
            rows.append(
                BASE
                | {"kind": "time", "transport": "shared", "way": way, "rank": 0, "collective": collective, "calls": 4}
                | {"tensors_bytes": moved, "sent_bytes": sent * formula, "formula_bytes": formula, "model_bytes": 4 * N}
            )
        states = state_bytes(N, way, 2, replicated=1000)
        held = {f"{part}_bytes": states[part] for part in PARTS}
        held |= {f"formula_{part}_bytes": states[part] for part in PARTS}
        for moment in tables.MOMENTS:
            peak = {"moment": moment, "peak_bytes": peaks * sum(states.values()), "machine_bytes": 24 * 2**30}
            rows.append(BASE | {"kind": "memory", "way": way, "rank": 0, "check": "ok"} | held | peak)
    add(GATHER, GATHER, gather_s)
    add("zero3", tables.WAITING, 0.01, gathers=16, in_time=12, gathering_s=0.05)
    return pd.DataFrame(rows)


def test_a_textbook_machine_is_answered_in_full():
    findings = _findings(_frame())
    assert {key: finding.verdict for key, finding in findings.items()} == {
        "peaks": "yes",
        "formula": "yes",
        "fsdp_saving": "yes",
        "bytes": "yes",
        "zero_stage_1": "counted",
        "time": "it depends",
        "torch": "yes",
        "break_even": "yes",
        "gathers": "yes",
        "largest_model": "predicted",
        "published_trends": "it depends",
    }
    for finding in findings.values():
        check_headline(finding.headline)
    assert findings["zero_stage_1"].headline.startswith("It sends 50 % more")
    assert "2 times faster" in findings["gathers"].headline


@pytest.mark.parametrize(
    ("optimizer", "noise", "advice"),
    [
        (TEXTBOOK, 0.002, "Shard the optimizer (ZeRO-1): less memory and less time; where memory is short, the opt"),
        (TEXTBOOK | {"zero3": 0.02}, 0.002, "Shard everything (FSDP (ZeRO-3)): less memory and less time."),
        (dict.fromkeys(STAGES, 0.06), 0.002, "Shard everything (FSDP (ZeRO-3)): less memory, and no clear cost"),
        (TEXTBOOK | {"zero1": 0.06, "zero2": 0.09}, 0.002, "Shard the optimizer (ZeRO-1): less memory, and no clear"),
        (TEXTBOOK | dict.fromkeys(STAGES[1:], 0.09), 0.002, "Do not shard unless memory is short"),
    ],
)
def test_the_advice_is_what_the_intervals_allow(optimizer, noise, advice):
    told = _findings(_frame(optimizer, noise=noise))["time"].advice
    assert told.replace(" through shared memory", "").startswith(advice)
    assert ("through shared memory" in told) == told.startswith("Shard")


def test_no_stage_is_advised_for_memory_that_it_does_not_save():
    frame = _frame()
    frame.loc[(frame["kind"] == "memory") & (frame["way"] == "zero2"), "peak_bytes"] *= 2
    assert "memory is short" not in _findings(frame)["time"].advice
    assert "by the formulas" not in _findings(frame)["time"].advice
    unmeasured = _findings(frame[frame["kind"] != "memory"])["time"].advice
    assert "memory is short" not in unmeasured
    assert "by the formulas" in unmeasured


def test_noise_claims_nothing():
    findings = _findings(_frame(dict.fromkeys(STAGES, 0.06), noise=0.5, torch_factor=1.0))
    assert {findings[key].verdict for key in ("time", "torch", "break_even")} == {"no clear difference"}
    assert not any(findings[key].significant for key in ("time", "torch", "break_even"))
    assert findings["time"].advice.startswith("Do not shard unless memory is short: what it costs in time is not clear")


def test_gathers_that_overlap_only_stretches_hide_nothing():
    finding = _findings(_frame(gather_s=0.004))["gathers"]
    assert finding.verdict == "no"
    assert finding.table["gathering_s"].item() == pytest.approx(0.05)


def test_gathers_that_are_hidden_at_the_cost_of_longer_passes_are_no_gain():
    """A step waits for less, and its passes take longer than DDP's with the gathers (20 ms) after them."""
    frame = _frame()
    frame.loc[frame["way"].eq("zero3") & frame["part"].eq("backward"), "seconds"] += 0.04
    found = _findings(frame)["gathers"]
    assert found.verdict == "yes"
    assert "FSDP's forward and backward take 17 % longer" in found.also
    assert "less time" in _findings(_frame())["gathers"].also


def test_a_wait_is_that_of_the_slowest_rank_wherever_it_stands():
    frame = _frame(noise=0)
    faster = frame[frame["part"].notna()].assign(rank=1)
    faster["seconds"] *= 0.5
    frame = pd.concat([frame, faster], ignore_index=True)
    waits = tables.times(frame).set_index(["way", "part"]).loc[(tables.FSDP, tables.WAITING), "seconds"]
    table = _findings(frame)["gathers"].table
    assert table["waiting_s"].item() == pytest.approx(waits)
    assert table["ratio"].item() == pytest.approx(table["waiting_s"].item() / table["alone_s"].item())
    assert table["in_time_percent"].item() == 75


def test_a_peak_that_is_missing_or_below_what_is_held_says_nothing():
    for peaks in (float("nan"), 0.5):
        findings = _findings(_frame(peaks=peaks))
        assert {findings[key].verdict for key in ("peaks", "fsdp_saving")} == {"not measured"}
        assert findings["formula"].verdict == "yes"


def test_what_the_transport_brings_and_what_the_implementation_brings_stand_apart():
    by_messages = _frame(dict.fromkeys(STAGES, 0.05), torch_factor=1.0).assign(transport="point_to_point")
    both = pd.concat([_frame(dict.fromkeys(STAGES, 0.05), torch_factor=4.0), by_messages])
    found = _findings(both)["torch"]
    assert found.verdict == "it depends"
    assert "through shared memory ZeRO-1 and FSDP (ZeRO-3) are 4 times faster than torch's" in found.headline


def test_a_gain_is_told_with_its_transport_and_its_optimizer():
    by_messages = _frame(TEXTBOOK | dict.fromkeys(STAGES[1:], 0.09)).assign(transport="point_to_point")
    both = pd.concat([_frame(), by_messages])
    found = _findings(both)["time"]
    assert found.verdict == "it depends"
    assert found.headline.startswith("It depends: with mini, through shared memory ZeRO-1 and ZeRO-2 take")
    assert found.also.startswith("Point to point ZeRO-1, ZeRO-2 and FSDP (ZeRO-3) take")
    assert "; through shared memory FSDP (ZeRO-3) takes" in found.also
    assert "through shared memory" in found.advice
    assert found.lead in found.effects
    assert found.lead.ratio < 1
    longer = _frame({"ddp": 0.004, "zero1": 0.012}).assign(optimizer="SGD")
    found = _findings(pd.concat([_frame(), longer]).assign(optimizer=lambda f: f["optimizer"].fillna("AdamW")))
    assert found["break_even"].headline.startswith("It depends: with AdamW through shared memory ZeRO-1 takes")
    assert found["break_even"].also.startswith("With SGD through shared memory ZeRO-1 takes")


def test_a_place_that_is_not_always_so_is_not_told():
    slower = _frame(TEXTBOOK | {"zero1": 0.09, "zero2": 0.09}).assign(world_size=4)
    found = _findings(pd.concat([_frame(), slower]))["time"]
    assert found.verdict == "it depends"
    assert "through shared memory" not in found.headline


def test_an_optimizer_that_is_dear_pays_where_one_that_is_cheap_does_not():
    cheap = _frame({"ddp": 0.004, "zero1": 0.012}).assign(optimizer="SGD")
    found = _findings(pd.concat([_frame().assign(optimizer="AdamW"), cheap]), calibration=MACHINE)["break_even"]
    assert found.verdict == "it depends"
    assert "right in 2 of 2" in found.why
    assert "AdamW" in found.headline or "SGD" in found.headline


def test_a_collective_that_is_missing_doubled_or_extra_is_not_that_of_the_formulas():
    frame = _frame()
    gather = frame["way"].eq("zero1") & frame["collective"].eq("all_gather")
    for change in ({"sent_bytes": 0.0}, {"formula_bytes": 0.0}):
        finding = _findings(frame.assign(**{name: frame[name].mask(gather, value) for name, value in change.items()}))
        assert finding["bytes"].verdict == "no"
        assert "ZeRO-1" in finding["bytes"].headline
    doubled = frame.assign(sent_bytes=frame["sent_bytes"].mask(gather, 2 * frame["sent_bytes"]))
    assert _findings(doubled)["bytes"].verdict != "yes"


def test_about_a_quarter_is_not_a_sixth():
    frame = _frame()
    zero1 = frame["way"].eq("zero1") & frame["peak_bytes"].notna()
    ddp = frame.loc[frame["way"].eq("ddp"), "peak_bytes"].max()
    for ratio, outcome in ((0.76, "holds here"), (0.84, "is not shown here")):
        changed = frame.assign(peak_bytes=frame["peak_bytes"].mask(zero1, ratio * ddp))
        claims = _findings(changed)["published_trends"].claims
        assert claims[0].outcome == outcome


def test_what_the_calibration_predicts_is_made_of_its_rates_and_a_wrong_sign_is_counted():
    row = predicting.break_even(_frame(), MACHINE).iloc[0]
    n_bytes = 4 * N
    # half an all-reduce at a nanosecond per byte, and copies that read and write every byte, at 5 GB/s per rank
    half = np.ceil(n_bytes / 2**22) / 2 * calibrated.ALPHA_S + n_bytes / 2 * 1e-9
    assert row["paid_s"] == pytest.approx(half + 2 * n_bytes / 5e9, rel=0.01)
    sgd = predicting.break_even(_frame().assign(optimizer="SGD"), MACHINE).iloc[0]
    assert sgd["saved_s"] == pytest.approx(0.5 * 3 * n_bytes / 5e9, rel=0.01)
    assert row["saved_s"] > 5 * sgd["saved_s"]
    assert (row["predicted_ratio"] < 1) == (row["saved_over_paid"] > 1)
    assert "right in 1 of 1" in _findings(_frame(), calibration=MACHINE)["break_even"].why
    slower = _findings(_frame(TEXTBOOK | {"zero1": 0.13}), calibration=MACHINE)["break_even"]
    assert slower.verdict == "no"
    assert "right in 0 of 1" in slower.why


def test_without_a_calibration_what_was_measured_is_told_alone():
    finding = _findings(_frame())["break_even"]
    assert (finding.verdict, finding.why) == ("yes", None)
    assert predicting.flip(_frame(), None).empty
    assert set(predicting.by_setting(_frame(), None)["kind"]) == {"measured"}


def test_with_a_slow_wire_it_is_predicted_to_lose_and_with_a_fast_one_to_win():
    slow_wire = replace(MACHINE, transports=tuple(replace(t, beta_s_per_byte=1e-7) for t in MACHINE.transports))
    ratios = [predicting.flip(_frame(), machine)["saved_over_paid"].item() for machine in (MACHINE, slow_wire)]
    assert ratios[0] > 1 > ratios[1]


def test_steps_are_predicted_before_they_are_measured_and_beside_them(cpu):
    points = STUDY.points(STUDY.profiles["quick"], cpu)
    before = STUDY.predicted.before(points, MACHINE)
    assert set(before["way"]) == {"DDP", "ZeRO-1"}
    assert set(before["size"]) == {"mini", "nano"}
    beside = STUDY.predicted.beside(_frame(), MACHINE)
    assert set(beside["way"]) == {"DDP", "ZeRO-1"}
    assert beside["measured_over_predicted"].gt(0).all()


def test_optimizers_and_batches_are_swept_one_by_one_and_all_of_two_ranks_share_a_group(cpu):
    points = STUDY.points(STUDY.profiles["quick"], cpu)
    swept = [(point.optimizer, point.batch) for point in points if point.size == "nano" and point.transport == "shared"]
    assert swept == [("AdamW", 1), ("SGD", 1), ("AdamW", 4)]
    assert {point.kind for point in by_ranks(points)[0]} == {"time", "memory"}


def test_bytes_and_memory_that_are_not_those_of_the_formulas_are_told():
    assert _findings(_frame(sent=1.5))["bytes"].verdict == "no"
    frame = _frame()
    wrong = frame["way"].eq("zero3") & frame["kind"].eq("memory")
    frame.loc[wrong, "gradients_bytes"] *= 2
    assert _findings(frame)["formula"].verdict != "yes"


def test_more_is_sharded_larger_models_fit():
    table = tables.fits(_frame()).query("place != 'here' and world_size == 64")
    assert table["parameters"].is_monotonic_increasing
    assert table["parameters"].iloc[-1] > 10 * table["parameters"].iloc[0]


def test_the_largest_model_is_told_with_all_that_hold_it_and_with_its_load():
    found = _findings(_frame())["largest_model"]
    here = found.table.query("place == 'here'").set_index("way")["model"]
    assert found.where.startswith("batch 1 · 32 tokens")
    for way, model in here.items():
        assert (way in found.advice) == (model == here[tables.FSDP])


def test_a_sharded_way_of_torchs_that_peaks_above_whole_copies_is_told():
    frame = _frame()
    torchs = frame[frame["way"].eq("ddp") & frame["kind"].eq("memory")].assign(way="torch_zero3")
    found = _findings(pd.concat([frame, torchs.assign(peak_bytes=1.2 * torchs["peak_bytes"])]))["peaks"]
    assert found.verdict == "yes"
    assert "Torch's FSDP needs 20 % more memory than DDP" in found.why


def test_published_pairs_disagree_on_the_sign():
    ratios = tables.published()["step_ratio"]
    assert ratios.min() < 1 < ratios.max()
