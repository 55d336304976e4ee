"""What a benchmark says of a promise that it was not asked to check; nothing is timed."""

import runpy
import sys
from pathlib import Path

import pandas as pd
import pytest

from labkit.lab.findings import Effect, Finding
from labkit.lab.project import recorded_directory
from labkit.parallel import launch
from labkit.studies.sync_batchnorm.alternatives import ALL_REDUCES, ALONE, COLLECTIVES, LOCAL, OWN

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
BENCHMARK, TWO_REPORTS = BENCHMARKS / "sync_batchnorm_against_gloo.py", BENCHMARKS / "two_reports.py"


def _status(monkeypatch, *arguments, layer_s):
    medians = dict.fromkeys((LOCAL, ALL_REDUCES, COLLECTIVES, ALONE), 1.0) | {OWN: layer_s}
    monkeypatch.setattr(launch, "run_ranks", lambda *_, **options: [medians] * options["world_size"])
    monkeypatch.setattr(sys, "argv", [BENCHMARK.name, *arguments])
    with pytest.raises(SystemExit) as exit_of:
        runpy.run_path(str(BENCHMARK), run_name="__main__")
    return exit_of.value.code


def test_the_promise_of_synchronized_batch_norm_is_kept_or_missed(monkeypatch, capsys):
    assert _status(monkeypatch, layer_s=2.9) == 0
    assert _status(monkeypatch, layer_s=3.1) == 1
    said = capsys.readouterr().out
    assert "promised 1: kept" in said
    assert "promised 1: MISSED" in said
    assert "not promised" not in said


def test_other_ranks_and_sizes_are_said_not_to_be_promised(monkeypatch, capsys):
    assert _status(monkeypatch, "--worlds", "4", "--features", "128", layer_s=9.0) == 0
    said = capsys.readouterr().out
    assert "not promised" in said
    assert "The promise was not checked" in said


def _effect(verdict, setting="small", *, exact=False):
    low, high = (0.5, 0.5) if exact else (0.4, 0.6)
    return Effect("the ring", "torch", setting, "time", 0.5, low, high, verdict)


def _told(*effects):
    return Finding("yes", "Yes.", pd.DataFrame(), effects=effects, significant=True)


def test_findings_of_one_report_are_found_again_not_shown_or_contradicted_by_another():
    two = runpy.run_path(str(TWO_REPORTS))
    nothing = "no difference shown"
    first = two["comparisons_of"](
        {
            "again": _told(_effect("faster"), _effect("faster", "large")),
            "not": _told(_effect("slower")),
            "against": _told(_effect("faster"), _effect("slower", "large")),
            "nothing": _told(_effect(nothing)),
            "counted": _told(_effect("faster", exact=True)),
        }
    )
    second = two["comparisons_of"](
        {
            "again": _told(_effect("faster"), _effect(nothing, "large")),
            "not": _told(_effect(nothing)),
            "against": _told(_effect("faster"), _effect("faster", "large")),
            "nothing": _told(_effect("faster")),
        }
    )
    there, back = two["looked_for"](first, second), two["looked_for"](second, first)
    assert dict(there.findings) == {"found again": 1, "not shown": 1, "contradicted": 1}
    assert dict(there.comparisons) == {"found again": 2, "not shown": 2, "contradicted": 1}
    assert dict(back.findings) == {"found again": 1, "not shown": 1, "contradicted": 1}


def test_a_report_agrees_with_itself_and_a_missing_lab_is_named(monkeypatch, capsys, tmp_path):
    (tmp_path / "kernels").symlink_to(recorded_directory() / "kernels")
    monkeypatch.setattr(sys, "argv", [TWO_REPORTS.name, str(tmp_path), str(tmp_path)])
    with pytest.raises(SystemExit) as exit_of:
        runpy.run_path(str(TWO_REPORTS), run_name="__main__")
    said = capsys.readouterr().out
    assert exit_of.value.code == 0
    assert "100% of the" in said
    assert "no run in" in said
