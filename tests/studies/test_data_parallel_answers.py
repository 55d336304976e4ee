"""Answers of the data-parallel lab on made-up frames: textbook, contrary, noisy, and with rows missing."""

import re
from functools import partial

import numpy as np
import pandas as pd
import pytest

from labkit.lab import figures
from labkit.parallel.data_parallel.implementations import DEFAULT_LAYOUT
from labkit.studies.data_parallel import analysis
from labkit.studies.data_parallel.study import STUDY
from tests.studies.answering import answers_of

_answers = partial(answers_of, STUDY)

BASE = {"workload": "resnet50", "world_size": 2, "backend": "gloo", "device": "cpu", "gate": "ok", "bucket_mb": None}
LOCAL_S, FORWARD_S, OPTIMIZER_S = 0.10, 0.05, 0.01
# What a pass waits for, if communication of 60 ms hides behind backward where it can.
TEXTBOOK = {"local": 0, "torch": 0.02, "naive": 0.08, "flat": 0.10, "overlapped": 0.03, "bucketed": 0.02}
TEXTBOOK |= {"bucketed_sync": 0.06}
KEEP = f"keep the default buckets ({DEFAULT_LAYOUT})"
SWEEPS = ("implementations", "buckets", "accumulation", "timeline", "memory")


def _frame(
    exposed=TEXTBOOK,
    *,
    noise=0.002,
    repeats=12,
    size_factor=lambda mb: 1.0,
    saved=0.7,
    sweeps=SWEEPS,
    gate=None,
    rank_factor=0.9,
):
    generator = np.random.default_rng(0)
    rows = []

    def add(sweep, seconds, **fields):
        for repeat in range(repeats):
            slowest = seconds * np.exp(generator.normal(0, noise))
            rows.extend(
                BASE
                | fields
                | {"sweep": sweep, "rank": rank, "repeat": repeat, "seconds": slowest * (1 if rank else rank_factor)}
                for rank in (0, 1)
            )

    for name, waits in exposed.items():
        about = {"implementation": name, "of_bucket_mb": None}
        add("implementations", FORWARD_S, phase="forward", **about)
        add("implementations", LOCAL_S + waits, phase="backward", **about)
        add("implementations", OPTIMIZER_S, phase="optimizer", **about)
        if name not in ("local", "torch"):
            add("implementations", max(waits, 1e-4), phase="waiting", **about)
    for mb in (1.0, 5.0, 100.0):
        for name, of_mb in (("torch", None), ("torch", mb), ("bucketed", None), ("bucketed", mb)):
            factor = 1.0 if of_mb is None else size_factor(of_mb)
            seconds = (LOCAL_S + exposed[name]) * factor
            add("buckets", seconds, implementation=name, of_bucket_mb=of_mb, bucket_mb=mb, phase="backward")
    for name in ("torch", "bucketed"):
        for kind, factor in (("every", 1.0), ("last", saved)):
            add("accumulation", 0.6 * factor, implementation=name, synchronized=kind, micro_batches=4, phase=None)
    for name, during in (("naive", 0.0), ("bucketed", 0.015)):
        point = BASE | {"sweep": "timeline", "implementation": name, "rank": 0}
        rows.append(point | {"lane": "backward", "start_s": 0.05, "duration_s": 0.1})
        rows += [point | {"lane": "all-reduce", "start_s": 0.06, "duration_s": 0.02, "during_s": during}] * 4
    for name, peak in (("torch", 200), ("flat", 300), ("bucketed", 200)):
        rows.append(BASE | {"sweep": "memory", "implementation": name, "rank": 0, "peak_bytes": peak * 2**20})
    frame = pd.DataFrame(rows)
    if gate:
        frame.loc[frame["implementation"] == gate, "gate"] = "wrong: error 5e-01, at most 1e-03 expected"
    return frame[frame["sweep"].isin(sweeps)]


def test_a_textbook_machine_is_answered_in_full():
    answers = _answers(_frame())
    assert all(answer.verdict != "not measured" for answer in answers.values())
    assert "naive 1.50" in answers["fastest"].text
    assert "avoid flat (up to 1.67 times), naive (up to 1.50 times)" in answers["fastest"].recommendation
    assert re.search(r"longer than one without communication by .* to .* with flat\.", answers["overlap"].text)
    assert answers["fastest"].text.startswith("Slower than torch's: naive")
    torchs = analysis.exposed(_frame()).set_index("implementation").loc["torch"]
    assert 0 < torchs["hidden_low_percent"] < torchs["hidden_percent"] < torchs["hidden_high_percent"] < 100
    hidden = (
        f"{torchs['hidden_percent']:.0f} % [{torchs['hidden_low_percent']:.0f}, {torchs['hidden_high_percent']:.0f}]"
    )
    assert f"does not wait for {hidden} with torch's" in answers["overlap"].text
    assert "4 of 4 of bucketed (75 % of their time)" in answers["overlap"].text
    assert "collectives that run during backward are 0 of 4 of naive" in answers["overlap"].text
    assert "flat 300 MiB (1.50 times torch's)" in answers["memory"].text
    assert "accumulate under no_sync: 0.70" in answers["accumulation"].recommendation


@pytest.mark.parametrize("frame", [pd.DataFrame(), _frame().iloc[:0]], ids=["no columns", "no rows"])
def test_without_rows_every_question_is_not_measured_and_says_why(frame):
    answers = _answers(frame, "8 copies need 51 GiB, 22 GiB available")
    assert {answer.verdict for answer in answers.values()} == {"not measured"}
    assert all("51 GiB" in answer.text for answer in answers.values())


@pytest.mark.parametrize("missing", SWEEPS)
def test_a_missing_sweep_leaves_the_other_answers(missing):
    answers = _answers(_frame(sweeps=[sweep for sweep in SWEEPS if sweep != missing]))
    silent = {
        "implementations": {"fastest", "overlap"},
        "buckets": {"bucket_size"},
        "accumulation": {"accumulation"},
        "timeline": set(),
        "memory": {"memory"},
    }[missing]
    assert {key for key, answer in answers.items() if answer.verdict == "not measured"} == silent


def test_a_step_is_the_sum_of_its_phases_on_the_slowest_rank():
    table = analysis.phases(_frame(noise=0)).set_index(["implementation", "phase"])["seconds"]
    assert table["torch", "step"] == pytest.approx(FORWARD_S + LOCAL_S + TEXTBOOK["torch"] + OPTIMIZER_S)
    assert table["naive", "waiting"] == pytest.approx(TEXTBOOK["naive"])


def test_exposed_communication_is_a_step_less_the_same_without():
    """What the forward pass broadcasts counts, and is told from what backward waits for."""
    frame = _frame(noise=0)
    broadcasts = (frame["implementation"] != "local") & (frame["phase"] == "forward")
    frame.loc[broadcasts & (frame["rank"] == 1), "seconds"] += 0.005
    table = analysis.exposed(frame).set_index("implementation")
    assert table.loc["naive", "seconds"] == pytest.approx(0.085)
    assert table.loc["naive", "backward_s"] == pytest.approx(0.08)
    most = table["seconds"].idxmax()
    assert f" to {table.loc[most, 'seconds'] * 1e3:.0f} ms [" in _answers(frame)["overlap"].text


def test_communication_and_what_hides_of_it():
    table = analysis.exposed(_frame(noise=0, rank_factor=1.0)).set_index("implementation")
    assert table.loc["bucketed", "communication_s"] == pytest.approx(0.06)
    assert table.loc["bucketed", "hidden_percent"] == pytest.approx(100 * 2 / 3)
    assert table.loc["bucketed", "of_step_percent"] == pytest.approx(100 * 0.02 / 0.18)


def test_where_nothing_hides_the_answer_is_no():
    answer = _answers(_frame(TEXTBOOK | {"torch": 0.06, "bucketed": 0.06, "overlapped": 0.08}))["overlap"]
    assert answer.verdict == "no"
    assert "Almost nothing hides: whoever carries the bytes takes the cores" in answer.text
    on_gpus = _frame(TEXTBOOK | {"torch": 0.06, "bucketed": 0.06, "overlapped": 0.08}).assign(device="cuda")
    assert "Almost nothing hides." in _answers(on_gpus)["overlap"].text


def test_waiting_for_a_slower_rank_is_not_communication():
    """Ranks take 100 and 130 ms in turns, then 60 ms for the collectives, of which nothing hides."""
    rows = []
    for repeat in range(12):
        for rank in (0, 1):
            computes = 0.13 if (rank + repeat) % 2 else 0.10
            about = BASE | {"sweep": "implementations", "rank": rank, "repeat": repeat, "of_bucket_mb": None}
            for phase, seconds in (("forward", 0.05), ("backward", computes), ("optimizer", 0.01)):
                rows.append(about | {"implementation": "local", "phase": phase, "seconds": seconds})
            for name in ("torch", "bucketed", "bucketed_sync"):
                for phase, seconds in (("forward", 0.05), ("backward", 0.13 + 0.06), ("optimizer", 0.01)):
                    rows.append(about | {"implementation": name, "phase": phase, "seconds": seconds})
            waits = about | {"implementation": "bucketed_sync", "phase": "waiting"}
            rows.append(waits | {"seconds": 0.13 + 0.06 - computes})
    table = analysis.exposed(pd.DataFrame(rows)).set_index("implementation")
    assert table["communication_s"].to_list() == pytest.approx([0.06] * 3)
    assert table["hidden_percent"].to_list() == pytest.approx([0] * 3, abs=1e-6)


def test_noise_is_no_evidence_that_nothing_hides():
    frame = _frame(TEXTBOOK | {"torch": 0.11, "bucketed": 0.16, "overlapped": 0.16}, noise=0.4)
    overlapping = analysis.exposed(frame).query("implementation in ['torch', 'bucketed', 'overlapped']")
    assert overlapping["hidden_percent"].max() < 10  # by medians alone
    answer = _answers(frame)["overlap"]
    assert answer.verdict == "measured"
    assert "Almost nothing" not in answer.text
    assert (
        analysis.exposed(frame)[["hidden_percent", "hidden_low_percent", "hidden_high_percent"]]
        .stack()
        .between(0, 100)
        .all()
    )


def test_without_torch_medians_are_reported():
    frame = _frame(noise=0)
    answer = _answers(frame[frame["implementation"].isin(["local", "naive"])])["fastest"]
    assert answer.verdict == "measured"
    assert "a backward pass takes with naive 180 ms [180 ms, 180 ms]." in answer.text


def test_a_wrapper_that_is_faster_than_torch_is_recommended_and_noise_recommends_nothing():
    fast = _answers(_frame(TEXTBOOK | {"torch": 0.05}))["fastest"]
    assert fast.verdict == "mixed"
    assert fast.recommendation.startswith("average gradients by labkit's bucketed: 0.80")
    noisy = _answers(_frame(dict.fromkeys(TEXTBOOK, 0.02), noise=0.5))["fastest"]
    assert noisy.verdict == "no difference shown"
    assert "nothing is shown to be faster everywhere, nor slower" in noisy.recommendation
    assert (fast.is_shown, noisy.is_shown) == (True, False)
    assert fast.evidence == "bucketed (resnet50, 2 ranks): 0.80 [0.80, 0.80]"  # of what is recommended, alone


def test_wrong_gradients_are_shouted():
    assert "WRONG GRADIENTS, and therefore no times, from flat" in _answers(_frame(gate="flat"))["fastest"].text


def test_bucket_sizes_that_do_not_matter_help_or_hurt():
    alike = _answers(_frame())["bucket_size"]
    assert alike.recommendation.startswith(f"{KEEP}: no size is shown")
    assert not alike.is_shown
    hurts = _answers(_frame(size_factor=lambda mb: 1.5 if mb == 1.0 else 1.0))["bucket_size"]
    assert hurts.verdict == "yes"
    assert hurts.is_shown
    assert hurts.recommendation == f"{KEEP}: none is shown to be faster, and 1 MiB slower."
    helps = _answers(_frame(size_factor=lambda mb: 0.5 if mb == 5.0 else 1.0))["bucket_size"]
    assert helps.recommendation.startswith("buckets of 5 MiB: 0.50")
    assert helps.recommendation.endswith("shown in 2 of 2 comparisons and contradicted in none.")


def test_a_bucket_size_is_compared_with_the_same_wrappers_default():
    """A wrapper that is twice as fast as torch's says nothing about bucket sizes."""
    table = analysis.buckets(_frame(TEXTBOOK | {"bucketed": -0.04}, noise=0))
    assert set(table["implementation"]) == {"torch", "bucketed"}
    assert table["ratio"].to_list() == pytest.approx([1.0] * 6)


def test_a_size_that_helps_one_setting_and_hurts_another_is_not_recommended():
    helps = _frame(size_factor=lambda mb: 0.5 if mb == 5.0 else 1.0)
    hurts = _frame(size_factor=lambda mb: 1.5 if mb == 5.0 else 1.0).assign(world_size=4)
    advice = _answers(pd.concat([helps, hurts]))["bucket_size"].recommendation
    assert advice == f"{KEEP}: 5 MiB is faster in one setting and slower in another."


def test_sizes_are_in_the_order_of_numbers():
    slow = _answers(_frame(size_factor=lambda mb: 1.5))["bucket_size"].recommendation
    assert slow.endswith("and 1 MiB, 5 MiB and 100 MiB slower.")


def test_no_sync_that_saves_nothing_is_not_recommended():
    answer = _answers(_frame(saved=1.0))["accumulation"]
    assert answer.verdict == "no difference shown"
    assert answer.recommendation is None


def test_published_trends_hold_are_contradicted_or_not_shown():
    slower = TEXTBOOK | {"bucketed": 0.04, "bucketed_sync": 0.06}
    assert _answers(_frame(slower))["published_trends"].verdict == "yes"
    contrary = TEXTBOOK | {"bucketed": 0.0, "bucketed_sync": -0.05}
    text = _answers(_frame(contrary, size_factor=lambda mb: mb / 25))["published_trends"].text
    assert text.count(": contradicted here") == 3
    assert "holds here" not in _answers(_frame(dict.fromkeys(TEXTBOOK, 0.02), noise=0.5))["published_trends"].text


def test_ranks_that_share_a_gpu_are_labeled():
    frame = _frame().assign(device="cuda")
    assert "ranks share a GPU: not a scaling result" in _answers(frame)["fastest"].text


def test_published_bucket_sizes_are_in_bytes_on_every_side():
    table = analysis.published()
    first = table[table["buffer_melements"] == 3].drop_duplicates("implementation").set_index("implementation")
    assert first.loc["torch", "bucket_bytes"] == 3 * 2**20
    assert first.loc["bucketed", "bucket_bytes"] == 12 * 2**20


def test_figures_can_be_drawn_from_two_worlds():
    frame = pd.concat([_frame(), _frame().assign(world_size=4)], ignore_index=True)
    for table, y in (
        (analysis.phases(frame).query("phase == 'backward'"), "seconds"),
        (analysis.exposed(frame), "seconds"),
        (analysis.memory(frame), "peak_bytes"),
        (analysis.accumulation(frame), "ratio"),
    ):
        options = {"x": "implementation", "x_order": analysis.ORDER, "hue": "workload", "facet": "world_size"}
        assert len(figures.bars(table, y=y, **options).figure.axes) == 2
    assert analysis.buckets(frame)["panel"].nunique() == 2


def test_a_run_whose_alternatives_are_all_wrong_has_answers_and_no_tables_of_times():
    gate = "wrong: a mean of whole numbers, which is whole, is off by 3"
    about = {"phase": None, "seconds": None, "rank": 0, "repeat": 0, "gate": gate, "of_bucket_mb": None}
    rows = [BASE | about | {"sweep": sweep, "implementation": "bucketed", "bucket_mb": 1.0} for sweep in SWEEPS]
    for frame in (pd.DataFrame(rows), pd.DataFrame(rows).drop(columns=["seconds", "phase"])):
        answers = _answers(frame)
        assert "WRONG GRADIENTS" in answers["fastest"].text
        assert {answer.verdict for answer in answers.values()} == {"not measured"}
        for table in (analysis.buckets, analysis.memory, analysis.accumulation, analysis.timeline, analysis.overlap):
            assert table(frame).empty
