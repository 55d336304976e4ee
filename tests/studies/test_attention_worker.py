"""What is measured at one point of the attention lab: gate first, reasons in rows, and the plan."""

import re
from dataclasses import replace

import pytest
import torch

from labkit.lab import figures
from labkit.lab.runs.measure import measure
from labkit.machine import describe_machine
from labkit.nn.attention import naive_attention
from labkit.nn.attention_implementations import IMPLEMENTATIONS, Implementation
from labkit.studies.attention import tables
from labkit.studies.attention.study import STUDY
from labkit.studies.attention.worker import AttentionPoint, measure_point
from labkit.studies.flash_attention.study import STUDY as FLASH_STUDY
from labkit.studies.shared import attention_passes

SMALL = AttentionPoint(
    sweep="grid", batch=2, sequence=64, head_dim=16, implementations=("explicit", "tiled"), warmup=0, repeats=2
)


def _rows(point, phase=None):
    return [row for row in measure_point(point) if phase is None or row["phase"] == phase]


def _pretend(monkeypatch, name, attend, reason=None):
    fake = Implementation(name, attend, lambda *_: reason)
    monkeypatch.setattr(
        attention_passes, "attention_named", lambda wanted: fake if wanted == name else IMPLEMENTATIONS[wanted]
    )


def test_each_implementation_is_checked_counted_and_timed():
    rows = _rows(SMALL)
    assert {(row["implementation"], row["phase"]) for row in rows} == {
        (name, phase) for name in ("explicit", "tiled") for phase in ("both", "saved", "forward", "backward")
    }
    assert all(len(row["seconds"]) == 2 for row in rows if row["phase"] in ("forward", "backward"))
    both = [row for row in rows if row["phase"] == "both"]
    assert all(row["check"] == "ok" and row["error"] < 1e-5 and row["available_bytes"] > 0 for row in both)


def test_what_is_kept_is_named():
    saved = {(row["implementation"], row["tensor"]): row["saved_bytes"] for row in _rows(SMALL, "saved")}
    assert saved["explicit", "probabilities"] == 2 * 64 * 64 * 4
    assert saved["tiled", "logsumexp"] == 2 * 64 * 4
    assert saved["tiled", "q"] == saved["explicit", "v"] == 2 * 64 * 16 * 4


def test_memory_only_has_no_times():
    assert not [row for row in _rows(replace(SMALL, repeats=0)) if "seconds" in row]


def test_a_wrong_implementation_gets_no_time(monkeypatch):
    _pretend(monkeypatch, "tiled", lambda q, k, v, causal: naive_attention(q, k, v, True))
    rows = _rows(SMALL)
    assert [row["check"][:5] for row in rows if row["implementation"] == "tiled" and row["phase"] == "both"] == [
        "wrong"
    ]
    assert {row["implementation"] for row in rows if "seconds" in row} == {"explicit"}


def _let_passes_take(monkeypatch, *seconds):
    told = iter(seconds)
    monkeypatch.setattr(attention_passes, "timed_once", lambda action, device: (action(), next(told)))


def test_one_whose_pass_takes_longer_than_all_rounds_may_is_checked_and_not_timed(monkeypatch):
    _let_passes_take(monkeypatch, 2.0, 2.0, 0.1)
    rows = _rows(replace(SMALL, rounds_s=1.0))
    (row,) = (row for row in rows if row["implementation"] == "explicit" and row["phase"] == "both")
    assert row["check"].startswith("right, but too slow")
    assert row["error"] < 1e-5
    assert row["peak_bytes"] is not None
    assert [row["tensor"] for row in rows if row["implementation"] == "explicit" and row["phase"] == "saved"]
    assert not [row for row in rows if "seconds" in row and row["implementation"] == "explicit"]


def test_one_that_met_a_stall_is_timed(monkeypatch):
    _let_passes_take(monkeypatch, 9.0, 0.1, 0.1)
    timed = {row["implementation"] for row in _rows(replace(SMALL, rounds_s=1.0)) if "seconds" in row}
    assert timed == {"explicit", "tiled"}


def test_one_that_is_wrong_and_slow_is_called_wrong(monkeypatch):
    _pretend(monkeypatch, "explicit", lambda q, k, v, causal: 2 * naive_attention(q, k, v, causal))
    _let_passes_take(monkeypatch, 2.0, 2.0, 0.1)
    rows = _rows(replace(SMALL, rounds_s=1.0), "both")
    assert [row["check"][:5] for row in rows if row["implementation"] == "explicit"] == ["wrong"]


def test_one_that_cannot_run_here_is_a_row_with_its_reason(monkeypatch):
    _pretend(monkeypatch, "tiled", None, "no such thing here")
    rows = [row for row in _rows(SMALL) if row["implementation"] == "tiled"]
    assert rows == [{"implementation": "tiled", "phase": "both", "check": "no such thing here"}]


def test_one_that_does_not_fit_is_a_row_with_both_sizes(monkeypatch):
    monkeypatch.setattr(attention_passes, "_available_bytes", lambda device: 100_000)
    rows = _rows(SMALL, "both")
    assert rows[0]["check"].startswith("needs ")
    assert rows[0]["check"].endswith("97.7 KiB available")


def test_one_that_runs_out_of_memory_all_the_same_leaves_the_others_alone(monkeypatch):
    def exhausted(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 51 GiB")

    _pretend(monkeypatch, "explicit", exhausted)
    rows = _rows(SMALL)
    assert rows[0]["check"].startswith("out of memory: CUDA out of memory")
    assert {row["implementation"] for row in rows if "seconds" in row} == {"tiled"}


class TritonError(Exception):
    """As compilers and drivers raise them: no RuntimeError."""


@pytest.mark.parametrize("error", [RuntimeError("cuDNN Frontend error: [cudnn_frontend] No plans"), TritonError()])
def test_one_that_raises_is_a_row_with_what_it_said_and_leaves_the_others_alone(monkeypatch, error):
    def broken(*_):
        raise error

    _pretend(monkeypatch, "explicit", broken)
    rows = _rows(SMALL)
    assert rows[0]["check"].startswith(f"failed: {type(error).__name__}")
    assert str(error) in rows[0]["check"]
    assert {row["implementation"] for row in rows if "seconds" in row} == {"tiled"}


def test_one_that_raises_only_when_it_is_timed_leaves_the_others_their_times(monkeypatch):
    calls = []

    def tires(q, k, v, causal):
        calls.append(None)
        if len(calls) > 4:
            raise RuntimeError("tired")
        return naive_attention(q, k, v, causal)

    _pretend(monkeypatch, "explicit", tires)
    rows = _rows(SMALL)
    gates = [row["check"] for row in rows if row["implementation"] == "explicit" and "check" in row]
    assert re.fullmatch(r"failed: RuntimeError: tired, line \d+ of test_attention_worker.py", gates[-1])
    times = [row["seconds"] for row in rows if "seconds" in row and row["implementation"] == "tiled"]
    assert [len(of_phase) for of_phase in times] == [SMALL.repeats] * 2


@pytest.mark.parametrize("profile", ["smoke", "quick", "standard", "paper"])
def test_no_point_is_planned_twice_and_one_shows_what_does_not_fit(profile):
    machine = describe_machine()
    points = STUDY.points(STUDY.profiles[profile], machine)
    assert len({point.id for point in points}) == len(points)
    reason = STUDY.skip_reason(points[-1], machine)
    assert "needs" in reason
    assert "available" in reason


def test_a_gpu_that_is_not_there_is_a_reason():
    machine = describe_machine().model_copy(update={"gpus": []})
    assert "needs a CUDA device" in STUDY.skip_reason(replace(SMALL, device="cuda"), machine)


def _last_row_wrong(q, k, v, causal):
    output = naive_attention(q, k, v, causal)
    return torch.cat([output[:, :-1], 2 * output[:, -1:]], dim=1)


def _mistaken(q, k, v, causal):
    return q.nothing_of_the_kind


@pytest.mark.parametrize(
    ("study", "sweep", "question"), [(STUDY, "tiling", "tiling"), (FLASH_STUDY, "lengths", "crossover")]
)
def test_a_readers_own_attention_is_gated_timed_drawn_and_named(study, sweep, question, tmp_path):
    own = {"mine": naive_attention, "wrong": _last_row_wrong, "mistaken": _mistaken}
    sizes = {"sequences": [32], "head_dims": [16], "implementations": ["explicit", "tiled"]}
    shorter = {"tiling_sequences": [64]} if study is STUDY else {"dtypes": ["float32"], "technique_sequences": []}
    config = study.profiles["smoke"].model_copy(update=sizes | shorter)
    run = measure(study, config, profile="smoke", alternatives=own, directory=tmp_path)
    assert not set(own) & set(IMPLEMENTATIONS)
    frame = run.frame()
    gates = frame[frame["phase"] == "both"].query("sweep == @sweep").groupby("implementation")["check"].first()
    rows = {"tiling": 63, "lengths": 31}
    assert f"output, sequence 0, row {rows[sweep]}, element " in gates["wrong"]
    assert re.search(r"expected \S+, got \S+$", gates["wrong"])
    assert re.match(r"failed: AttributeError: .*, line \d+ of test_attention_worker.py", gates["mistaken"])
    table = tables.times(frame, sweep)
    assert set(table["implementation"]) == {"explicit", "tiled", "mine"}
    figures.lines(table, x="sequence", y="seconds", hue="implementation", hue_order=tables.ORDER, facet="phase")
    finding = study.findings(frame, run.coverage())[question]
    assert "mine" in {effect.subject for effect in finding.effects}
    assert "wrong" in finding.caveat
