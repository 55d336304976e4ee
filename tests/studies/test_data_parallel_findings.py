"""Findings of the data-parallel lab on made-up frames: textbook, contrary, noisy, and with rows missing."""

import re
from functools import partial

import numpy as np
import pandas as pd
import pytest

from labkit.lab import figures
from labkit.studies.data_parallel import tables
from labkit.studies.data_parallel.study import STUDY
from tests.studies.answering import answers_of

_findings = partial(answers_of, STUDY)

BASE = {"workload": "resnet50", "world_size": 2, "backend": "gloo", "device": "cpu", "check": "ok", "bucket_mb": None}
LOCAL_S, FORWARD_S, OPTIMIZER_S = 0.10, 0.05, 0.01
# What a pass waits for, if communication of 60 ms hides behind backward where it can.
TEXTBOOK = {"local": 0, "torch": 0.02, "naive": 0.08, "flat": 0.10, "overlapped": 0.03, "bucketed": 0.02}
TEXTBOOK |= {"bucketed_sync": 0.06}
SWEEPS = ("implementations", "buckets", "accumulation", "timeline", "memory")


def _frame(
    exposed=TEXTBOOK,
    *,
    noise=0.002,
    repeats=12,
    size_factor=lambda mb: 1.0,
    saved=0.7,
    sweeps=SWEEPS,
    check=None,
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
    for name, calls, during in (("torch", 1, 0.0), ("naive", 4, 0.0), ("bucketed", 4, 0.015)):
        point = BASE | {"sweep": "timeline", "implementation": name, "rank": 0}
        rows.append(point | {"lane": "backward", "start_s": 0.05, "duration_s": 0.1})
        rows += [point | {"lane": "all-reduce", "start_s": 0.06, "duration_s": 0.02, "during_s": during}] * calls
    for name, peak in (("torch", 200), ("flat", 300), ("bucketed", 200)):
        rows.append(BASE | {"sweep": "memory", "implementation": name, "rank": 0, "peak_bytes": peak * 2**20})
    frame = pd.DataFrame(rows)
    if check:
        frame.loc[frame["implementation"] == check, "check"] = "wrong: error 5e-01, at most 1e-03 expected"
    return frame[frame["sweep"].isin(sweeps)]


def test_a_textbook_machine_is_answered_in_full():
    findings = _findings(_frame())
    assert {key: finding.verdict for key, finding in findings.items()} == {
        "fastest": "no",
        "bucket_size": "no clear difference",
        "overlap": "measured",
        "memory": "no",
        "accumulation": "yes",
        "published_trends": "it depends",
    }
    fastest = findings["fastest"]
    assert fastest.advice == "Keep torch's DDP."
    assert "at worst flat takes 67 % longer" in fastest.headline
    why = _findings(_frame(noise=0))["fastest"].why
    assert "makes 3 calls more than torch's DDP; at 20 ms each they are 60 ms of the 60 ms" in why
    torchs = tables.exposed(_frame()).set_index("implementation").loc["torch"]
    assert 0 < torchs["hidden_low_percent"] < torchs["hidden_percent"] < torchs["hidden_high_percent"] < 100
    assert "up to 75 % of the collectives' time" in findings["overlap"].also
    assert "at worst flat needs 50 % more memory" in findings["memory"].headline
    assert findings["accumulation"].advice == "Accumulate gradients under no_sync."


@pytest.mark.parametrize("missing", SWEEPS)
def test_a_missing_sweep_leaves_the_other_findings(missing):
    findings = _findings(_frame(sweeps=[sweep for sweep in SWEEPS if sweep != missing]))
    silent = {"implementations": {"fastest", "overlap"}, "buckets": {"bucket_size"}, "timeline": set()}
    silent |= {"accumulation": {"accumulation"}, "memory": {"memory"}}
    assert {key for key, finding in findings.items() if finding.verdict == "not measured"} == silent[missing]


def test_a_step_is_the_sum_of_its_phases_on_the_slowest_rank():
    table = tables.phases(_frame(noise=0)).set_index(["implementation", "phase"])["seconds"]
    assert table["torch", "step"] == pytest.approx(FORWARD_S + LOCAL_S + TEXTBOOK["torch"] + OPTIMIZER_S)
    assert table["naive", "waiting"] == pytest.approx(TEXTBOOK["naive"])


def test_a_wrapper_has_one_ratio_to_torchs_in_all_tables():
    frame = _frame(noise=0.3)
    table = tables.phases(frame)
    of_phases = table[(table["phase"] == "backward") & ~table["implementation"].isin(["local", "torch"])]
    ratios = tables.against(frame, "torch").set_index("implementation")["ratio"]
    assert (1 + of_phases["to_torch_percent"] / 100).tolist() == pytest.approx(
        ratios[of_phases["implementation"]].tolist()
    )


def test_calls_explain_nothing_that_is_not_shown():
    assert _findings(_frame(noise=0, repeats=5))["fastest"].why is None


def test_exposed_communication_is_a_step_less_the_same_without():
    """What the forward pass broadcasts counts, and is told from what backward waits for."""
    frame = _frame(noise=0)
    broadcasts = (frame["implementation"] != "local") & (frame["phase"] == "forward")
    frame.loc[broadcasts & (frame["rank"] == 1), "seconds"] += 0.005
    table = tables.exposed(frame).set_index("implementation")
    assert table.loc["naive", "seconds"] == pytest.approx(0.085)
    assert table.loc["naive", "backward_s"] == pytest.approx(0.08)


def test_communication_and_what_hides_of_it():
    table = tables.exposed(_frame(noise=0, rank_factor=1.0)).set_index("implementation")
    assert table.loc["bucketed", "communication_s"] == pytest.approx(0.06)
    assert table.loc["bucketed", "hidden_percent"] == pytest.approx(100 * 2 / 3)
    assert table.loc["bucketed", "of_step_percent"] == pytest.approx(100 * 0.02 / 0.18)
    headline = _findings(_frame(noise=0, rank_factor=1.0))["overlap"].headline
    assert headline == "62 to 67 % of the communication hides."


def test_what_starts_after_backward_hides_nothing_and_what_costs_more_than_it_takes_alone_hides_no_less_than_nothing():
    found = _findings(_frame(TEXTBOOK | {"torch": 0.056, "overlapped": 0.1}))["overlap"]
    hidden = found.table.set_index("implementation")["hidden_percent"]
    assert hidden.dropna().index.tolist() == ["torch", "overlapped", "bucketed"]
    assert hidden["overlapped"] < 0
    assert re.match(r"0 to \d\d % of the communication hides", found.headline)


def test_what_runs_during_backward_and_is_not_saved_comes_first():
    found = _findings(_frame(TEXTBOOK | {"torch": 0.045, "bucketed": 0.05, "overlapped": 0.08}))["overlap"]
    assert re.match(r"At most 1\d % .*though up to 75 % of the collectives' time runs during backward", found.headline)


def test_where_nothing_hides_it_is_said():
    frame = _frame(TEXTBOOK | {"torch": 0.06, "bucketed": 0.06, "overlapped": 0.08})
    assert _findings(frame)["overlap"].headline.startswith("Almost nothing: at most")
    assert "take the cores that backward needs" in _findings(frame)["overlap"].why
    assert _findings(frame.assign(device="cuda"))["overlap"].why is None


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
    table = tables.exposed(pd.DataFrame(rows)).set_index("implementation")
    assert table["communication_s"].to_list() == pytest.approx([0.06] * 3)
    assert table.loc[["torch", "bucketed"], "hidden_percent"].to_list() == pytest.approx([0] * 2, abs=1e-6)


def test_noise_is_no_evidence_that_nothing_hides():
    frame = _frame(TEXTBOOK | {"torch": 0.11, "bucketed": 0.16, "overlapped": 0.16}, noise=0.4)
    hidden = tables.exposed(frame)[["hidden_percent", "hidden_low_percent", "hidden_high_percent"]]
    overlapping = tables.exposed(frame).query("implementation in ['torch', 'bucketed', 'overlapped']")
    assert overlapping["hidden_percent"].max() < 10  # by medians alone
    assert hidden.min().min() < 0, "nothing is cut off into certainty"
    assert _findings(frame)["overlap"].verdict == "undecided"


def test_no_step_waits_for_less_than_nothing():
    frame = _frame(TEXTBOOK | {"torch": -0.03}, sweeps=["implementations"])
    alone = frame[frame["implementation"].isin(["local", "torch", "naive"])]
    assert tables.exposed(alone)["seconds"].min() < 0
    assert re.fullmatch("A step waits for [78]\\d(.\\d)? ms of communication.", _findings(alone)["overlap"].headline)
    assert _findings(alone[alone["implementation"] != "naive"])["overlap"].verdict == "undecided"


def test_a_wrapper_that_is_faster_than_torch_is_recommended_and_noise_recommends_nothing():
    fast = _findings(_frame(TEXTBOOK | {"torch": 0.05}))["fastest"]
    assert (fast.verdict, fast.significant) == ("yes", True)
    assert fast.advice == "Average gradients with bucketed."
    assert fast.also.startswith("A step with bucketed takes 1")  # 30 ms of 210
    noisy = _findings(_frame(dict.fromkeys(TEXTBOOK, 0.02), noise=0.5))["fastest"]
    assert (noisy.verdict, noisy.significant) == ("no clear difference", False)
    assert noisy.advice == "Keep torch's DDP."


def test_a_bucket_size_that_hurts_helps_or_does_both():
    hurts = _findings(_frame(size_factor=lambda mb: 1.5 if mb == 1.0 else 1.0))["bucket_size"]
    assert (hurts.verdict, hurts.significant) == ("no", True)
    assert hurts.advice.startswith("Keep the default buckets")
    faster = _frame(size_factor=lambda mb: 0.5 if mb == 5.0 else 1.0)
    assert _findings(faster)["bucket_size"].advice == "Use a bucket size of 5 MiB."
    slower = _frame(size_factor=lambda mb: 1.5 if mb == 5.0 else 1.0).assign(world_size=4)
    both = _findings(pd.concat([faster, slower]))["bucket_size"]
    assert (both.verdict, both.advice) == ("it depends", "Use a bucket size of 5 MiB with 2 ranks.")


def test_a_setting_does_not_repeat_the_bucket_size_that_is_compared():
    found = _findings(_frame())["bucket_size"]
    assert {effect.setting for effect in found.effects if "5 MiB" in effect.subject} == {
        "resnet50, 2 ranks, gloo, cpu, torch",
        "resnet50, 2 ranks, gloo, cpu, bucketed",
    }
    assert found.where.endswith("torch and bucketed · buckets of 1 to 100 MiB")


def test_memory_that_is_not_seen_is_said_to_be_unmeasured():
    found = _findings(_frame(TEXTBOOK | {"naive_shared": 0.01}))
    assert found["fastest"].advice == "Average gradients with naive_shared."
    assert "naive_shared" in found["memory"].caveat
    without = _frame(TEXTBOOK | {"naive_shared": 0.01}, sweeps=["implementations"])
    assert "needs 51 GiB" in _findings(without, "needs 51 GiB")["memory"].caveat


def test_a_bucket_size_is_compared_with_the_same_wrappers_default():
    """A wrapper that is twice as fast as torch's says nothing about bucket sizes."""
    table = tables.buckets(_frame(TEXTBOOK | {"bucketed": -0.04}, noise=0))
    assert set(table["implementation"]) == {"torch", "bucketed"}
    assert table["ratio"].to_list() == pytest.approx([1.0] * 6)


def test_no_sync_that_saves_nothing_or_only_sometimes_is_not_called_faster():
    nothing = _findings(_frame(saved=1.0))["accumulation"]
    assert (nothing.verdict, nothing.advice) == ("no clear difference", None)
    one_of_two = _frame(saved=1.0)
    gains = (one_of_two["implementation"] == "bucketed") & (one_of_two["synchronized"] == "last")
    one_of_two.loc[gains, "seconds"] *= 0.7
    assert _findings(one_of_two)["accumulation"].verdict == "it depends"


def test_published_trends_hold_are_contradicted_or_not_shown():
    def outcomes(frame):
        return {claim.outcome for claim in _findings(frame)["published_trends"].claims}

    assert outcomes(_frame(TEXTBOOK | {"bucketed": 0.04, "bucketed_sync": 0.06})) == {"holds here"}
    contrary = TEXTBOOK | {"bucketed": 0.0, "bucketed_sync": -0.05}
    assert outcomes(_frame(contrary, size_factor=lambda mb: mb / 25)) == {"is contradicted here"}
    assert outcomes(_frame(dict.fromkeys(TEXTBOOK, 0.02), noise=0.5)) == {"is not shown here"}


def test_ranks_that_share_a_gpu_are_labeled():
    findings = _findings(_frame().assign(device="cuda"))
    assert all("share a GPU" in findings[name].caveat for name in ("fastest", "bucket_size", "overlap", "accumulation"))


def test_published_bucket_sizes_are_in_bytes_on_every_side():
    smallest = tables.published_ratios().groupby("implementation")["bucket_bytes"].min()
    assert (smallest["torch"], smallest["bucketed"]) == (3 * 2**20, 12 * 2**20)


def test_figures_can_be_drawn_from_two_worlds():
    frame = pd.concat([_frame(), _frame().assign(world_size=4)], ignore_index=True)
    for table, y in (
        (tables.phases(frame).query("phase == 'backward'"), "seconds"),
        (tables.exposed(frame), "seconds"),
        (tables.memory(frame), "peak_bytes"),
        (tables.accumulation(frame), "ratio"),
    ):
        options = {"x": "implementation", "x_order": tables.ORDER, "hue": "workload", "facet": "world_size"}
        assert len(figures.bars(table, y=y, **options).figure.axes) == 2
    assert tables.buckets(frame)["panel"].nunique() == 2


def test_wrong_gradients_are_shouted():
    fastest = _findings(_frame(check="flat"))["fastest"]
    assert "WRONG RESULTS, and so no times, from flat" in fastest.caveat


def test_a_run_whose_alternatives_are_all_wrong_shouts_and_has_no_tables_of_times():
    gate = "wrong: a mean of whole numbers, which is whole, is off by 3"
    about = {"phase": None, "seconds": None, "rank": 0, "repeat": 0, "check": gate, "of_bucket_mb": None}
    rows = [BASE | about | {"sweep": sweep, "implementation": "bucketed", "bucket_mb": 1.0} for sweep in SWEEPS]
    for frame in (pd.DataFrame(rows), pd.DataFrame(rows).drop(columns=["seconds", "phase"])):
        findings = _findings(frame)
        assert {finding.verdict for finding in findings.values()} == {"not measured"}
        assert "WRONG RESULTS" in findings["fastest"].caveat
        for table in (tables.buckets, tables.memory, tables.accumulation, tables.timeline, tables.overlap):
            assert table(frame).empty
