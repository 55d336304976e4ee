"""What a benchmark says of a promise that it was not asked to check; nothing is timed."""

import runpy
import sys
from pathlib import Path

import pytest

from labkit.parallel import launch
from labkit.studies.sync_batchnorm.alternatives import ALL_REDUCES, ALONE, COLLECTIVES, LOCAL, OWN

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "sync_batchnorm_against_gloo.py"


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
