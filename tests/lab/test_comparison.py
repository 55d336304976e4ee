"""Runs side by side by their answers: what agrees, differs or is lost, which runs are copies, and
bad input by name."""

import json
import os
from html.parser import HTMLParser

import numpy as np
import pandas as pd
import pytest

from labkit.bench.statistics import NO_DIFFERENCE_SHOWN
from labkit.lab.answers import Check, Compare
from labkit.lab.compare import (
    compare_runs,
    load_runs,
    run_names,
    without_copies,
    write_comparison,
)
from labkit.lab.config import LabConfig, ParameterError
from labkit.lab.declaration import Lab
from labkit.lab.metric import Metric
from labkit.lab.runs.store import Run, RunFileError
from labkit.machine.description import describe_machine
from labkit.studies import LABS
from labkit.studies import load_lab as load_real
from tests.cases import thinned
from tests.pages.cells import recorded

EVIL = "<script>alert(1)</script>"
QUOTED = "\" onerror='alert(1)"
SIZES = (1024, 4096, 16384, 65536, 262144, 1048576)
TIME = Metric("seconds", "algorithm", ("world_size", "n_elements"))


def load_lab(name):
    predicted = {
        "measured": "b",
        "predicted": "c",
        "table": lambda results: pd.DataFrame(columns=["b", "c"]),
    }
    questions = [
        Compare(id="faster", text="Is the ring faster?", metric=TIME, baseline="torch"),
        Check(id="predicted", text="Is it predicted?", **predicted),
    ]
    about = {
        "config": LabConfig,
        "points": lambda config, machine: [],
        "worker": lambda point: None,
    }
    return Lab(name=name, title=f"Lab {name}", summary="", questions=questions, **about)


def run_file(
    path,
    *,
    lab="lab",
    ring=0.5,
    sizes=SIZES,
    point=(),
    config=(),
    started=0,
    seed=0,
    repeats=20,
    **machine,
):
    """A run of one point per size, in which a ring takes `ring` times as long as torch."""
    facts = (
        describe_machine().model_dump(mode="json") | {"source": {"commit": "abc1234def"}} | machine
    )
    fields = {"world_size": 2, "device": "cpu", "timeout_s": 60 + seed} | dict(point)
    points = {f"p{n}": fields | {"n_elements": n // 4} for n in sizes}
    header = {
        "kind": "header",
        "format_version": 2,
        "lab": lab,
        "profile": "quick",
        "config": dict(config),
    }
    header |= {
        "machine": facts,
        "command": "labkit measure",
        "started": f"2026-01-01T00:0{started}:00Z",
    }
    lines = [header | {"planned": points}]
    generator = np.random.default_rng(seed)
    for name, of_point in points.items():
        for rank in (0, 1):
            for algorithm, slower in (("ring", ring), ("torch", 1.0)):
                noise = 1 + 0.02 * generator.standard_normal(repeats)
                seconds = list(slower * of_point["n_elements"] * 1e-8 * noise)
                values = {"algorithm": algorithm, "status": "ok", "seconds": seconds}
                lines.append({"kind": "row", "point": name, "rank": rank, "values": values})
        lines.append(
            {"kind": "end", "point": name, "status": "ok", "reason": None, "elapsed_s": 1.0}
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Run.load(path)


def pair_of(*runs):
    (pair,) = compare_runs(runs, load_lab)
    return pair


@pytest.fixture
def first(tmp_path):
    return run_file(tmp_path / "first.jsonl", cpu="One")


@pytest.mark.parametrize(
    ("changes", "outcome"),
    [
        ({"ring": 0.5}, "agree"),
        ({"ring": 0.7}, "agree"),
        ({"ring": 1.5}, "opposite"),
        ({"ring": 1.0}, "differ"),
        ({"repeats": 4}, "open"),  # too few to tell
        ({"repeats": 0}, "lost"),
    ],
)
def test_verdicts_agree_differ_are_open_lost_or_gained(changes, outcome, first, tmp_path):
    other = run_file(tmp_path / "b.jsonl", cpu="Two", seed=1, **changes)
    assert pair_of(first, other).outcomes == {"faster": outcome}
    assert pair_of(other, first).outcomes == {"faster": "gained" if outcome == "lost" else outcome}


@pytest.mark.parametrize(
    ("ring", "difference"), [(0.5, NO_DIFFERENCE_SHOWN), (0.6, "higher"), (0.4, "lower")]
)
def test_ratios_stand_side_by_side_and_differ_if_their_intervals_are_apart(
    ring, difference, first, tmp_path
):
    ratios = pair_of(first, run_file(tmp_path / "b.jsonl", cpu="Two", ring=ring, seed=1)).ratios
    assert set(ratios["difference"]) == {difference}
    assert len(ratios) == len(SIZES)
    assert ratios["ratio"].between(0.97 * ring, 1.03 * ring).all()


@pytest.mark.parametrize(
    "name", ["seed", "rounds_s", "warmup", "ratio_within", "sessions", "timeout_s"]
)
def test_how_often_and_how_long_makes_no_two_runs_incomparable(name, first, tmp_path):
    pair = pair_of(
        first, run_file(tmp_path / "b.jsonl", cpu="Two", point={name: 7}, config={name: 7})
    )
    assert (pair.n_shared, pair.n_others) == (len(SIZES), 0)
    assert pair.parameters == {}


def test_only_shared_points_are_compared_and_the_parameter_that_differs_is_named(first, tmp_path):
    sizes = (*SIZES[:4], 12345 * 4)
    about = {"sizes": sizes, "point": {"device": "cuda"}, "config": {"sizes_bytes": list(sizes)}}
    pair = pair_of(first, run_file(tmp_path / "b.jsonl", cpu="Two", **about))
    assert (pair.n_shared, pair.n_others) == (4, 3)
    assert pair.parameters == {"sizes_bytes": (None, list(sizes))}
    assert len(pair.ratios) == 4
    apart = run_file(tmp_path / "c.jsonl", cpu="Two", sizes=(28,), config={"sizes_bytes": [28]})
    with pytest.raises(
        ParameterError, match=r"runs of lab share no point: sizes_bytes: None and \[28\]"
    ):
        pair_of(first, apart)


def test_a_copy_of_a_run_is_left_out_and_so_is_a_partial_copy(tmp_path):
    whole = run_file(tmp_path / "run.jsonl")
    copy = tmp_path / "run(1).jsonl"
    partial = tmp_path / "before.jsonl"
    copy.write_bytes(whole.path.read_bytes())
    partial.write_text("".join(whole.path.read_text().splitlines(keepends=True)[:8]))
    again = run_file(tmp_path / "again.jsonl", started=1)
    runs, left_out = without_copies(
        [Run.load(path) for path in (partial, whole.path, copy, again.path)]
    )
    assert [run.path for run in runs] == [whole.path, again.path]
    assert left_out == {
        str(partial): f"a partial copy of {whole.path}",
        str(copy): f"a copy of {whole.path}",
    }
    with pytest.raises(
        RunFileError, match=r"two different runs, got 1; .*run\(1\)\.jsonl: a copy of"
    ):
        load_runs([str(whole.path), str(copy)])


def test_runs_are_named_by_machine_and_by_start_if_they_share_it(tmp_path):
    def names(*runs):
        return [name.removeprefix("2-core ") for name in run_names(runs).values()]

    common = {"cores": 2, "gpus": []}
    a = run_file(tmp_path / "a.jsonl", cpu="One", **common)
    b = run_file(tmp_path / "b.jsonl", cpu="Two", **common)
    c = run_file(tmp_path / "c.jsonl", cpu="One", started=1, **common)
    assert names(a, b) == ["One", "Two"]
    assert names(a, c) == ["One, 2026-01-01 00:00:00", "One, 2026-01-01 00:01:00"]


@pytest.mark.parametrize(
    "lab", thinned(LABS, lambda lab: lab in ("training_step", "sharding", "cifar100"))
)
def test_every_recorded_run_is_compared_with_itself_and_agrees(lab):
    run = recorded(lab)
    (pair,) = compare_runs([run, Run.load(run.path)], load_real)
    assert set(pair.outcomes.values()) == {"agree"}
    assert set(pair.ratios["difference"]) <= {NO_DIFFERENCE_SHOWN}


def test_nothing_to_compare_and_what_is_no_run_are_one_clear_message(first, tmp_path):
    with pytest.raises(ParameterError, match="one run each of lab, other"):
        compare_runs([first, run_file(tmp_path / "b.jsonl", lab="other")], load_lab)
    (tmp_path / "empty").mkdir()
    (tmp_path / "foreign.jsonl").write_text('{"some": "thing"}\n')
    for names, error in (
        (["no-such-run"], "no-such-run"),
        ([str(tmp_path / "foreign.jsonl")], r"foreign\.jsonl: not a run"),
        ([str(tmp_path / "empty")], "empty: it holds no run"),
    ):
        with pytest.raises(ParameterError, match=error):
            load_runs(names)


@pytest.mark.parametrize("evil", [EVIL, QUOTED, "$x^{$", "a_b\n<b>"])
def test_nothing_that_a_run_says_becomes_markup(evil, tmp_path):
    """Names of the lab, the machine, its host and commit, and values of parameters."""
    runs = []
    for number in range(2):
        machine = {"cpu": f"{evil} {number}", "host": evil, "source": {"commit": evil}}
        run = run_file(
            tmp_path / f"{number}.jsonl", lab=f"l {evil}", config={"a": [evil, number]}, **machine
        )
        run.path.write_text(run.path.read_text().replace(json.dumps("ring"), json.dumps(evil)))
        runs.append(Run.load(run.path))
    page = tmp_path / "compare.html"
    write_comparison(
        compare_runs(runs, load_lab), f"labkit compare {evil}", page, {f"a {evil}.jsonl": evil}
    )
    tags = []
    attributes = set()
    reader = HTMLParser()
    reader.handle_starttag = lambda tag, pairs: (
        tags.append(tag),
        attributes.update(name for name, _ in pairs),
    )
    reader.feed(page.read_text())
    assert tags.count("script") == 1
    assert "b" not in tags
    assert not [name for name in attributes if name.startswith("on") or "'" in name]


def test_folders_of_runs_are_read_and_what_cannot_be_is_listed(tmp_path, monkeypatch):
    for number in range(2):
        student = tmp_path / f"student{number}"
        run_file(student / f"data/runs/lab/{number}.jsonl", cpu=f"cpu {number}", seed=number)
    (tmp_path / "student0/data/runs/empty.jsonl").touch()
    scandir = os.scandir
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.setattr(
        os, "scandir", lambda path: scandir(path if str(path) != str(gone) else gone / "elsewhere")
    )
    runs, left_out = load_runs([str(tmp_path)])
    assert [run.name for run in runs] == ["0", "1"]
    write_comparison(
        compare_runs(runs, load_lab), "labkit compare", tmp_path / "compare.html", left_out
    )
    assert left_out.pop(str(tmp_path / "student0/data/runs/empty.jsonl")).startswith("not a run")
    assert "empty.jsonl</code>: not a run" in (tmp_path / "compare.html").read_text()
