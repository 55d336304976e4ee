"""What else the machine does during a measurement: recorded, named on the page, and never in the
way."""

import json
from statistics import median_low
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from labkit.bench.probe import PROBE, probe, probed
from labkit.lab.pages import cards
from labkit.lab.project import recorded_directory
from labkit.lab.runs.measure import measure
from labkit.lab.runs.store import Run
from labkit.machine.load import Load, LoadMeter, busy_points, busy_reason, slowdown_by_others
from tests.lab.fake_lab import FAKE, FakeConfig
from tests.parallel.shared_ranks import on_ranks


def _load(**fields):
    return Load().model_copy(update=fields)


def test_a_thread_that_waits_for_a_core_is_slowed_down_by_as_much(monkeypatch):
    now = SimpleNamespace(s=0.0)

    def thread_time():
        now.s += 0.01
        return now.s

    monkeypatch.setattr("labkit.machine.load.time.thread_time", thread_time)
    for factor in (1.0, 5.0):
        monkeypatch.setattr("labkit.machine.load.time.perf_counter", lambda: factor * now.s)  # noqa: B023
        assert slowdown_by_others() == pytest.approx(factor, rel=0.1)


@pytest.mark.parametrize(
    ("cores", "is_busy", "fields"),
    [
        (2, False, {"busy_cores": 0.3, "throttled_share": 0.01}),
        (2, True, {"busy_cores": 0.6}),
        (2, True, {"stolen_cores": 0.7}),
        (64, False, {"busy_cores": 2.0}),
        (64, True, {"busy_cores": 12.0}),
        (2, True, {"throttled_share": 0.9}),
    ],
)
def test_what_takes_cores_makes_a_point_busy(cores, is_busy, fields):
    assert bool(busy_reason(_load(**fields), cores)) == is_busy
    assert (busy_points({"a": _load(**fields)}, cores).keys() == {"a"}) == is_busy


def test_late_ranks_and_slow_memory_are_named_by_the_probes_of_a_run():
    quiet = {
        f"quiet {i}": _load(ping_s=1e-4 * (1 + i / 4), copy_s=0.013 * (1 + i / 8)) for i in range(4)
    }
    odd = {"late": _load(ping_s=3e-3, copy_s=0.013), "slow": _load(copy_s=0.04), "older": _load()}
    reasons = busy_points(quiet | odd, 2)
    assert reasons.keys() == {"late", "slow"}
    assert "woke up late (30 times" in reasons["late"]
    assert "memory was slow (2." in reasons["slow"]


@pytest.mark.parametrize(
    "path", sorted(recorded_directory().glob("*/*.jsonl")), ids=lambda path: path.parent.name
)
def test_a_slow_phase_of_the_memory_is_told_from_what_the_probes_of_a_quiet_machine_vary(path):
    """Copies of a quiet machine take up to 1.85 times the median; phases of slow memory, 2 to 4
    times."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    loads = {
        line["point"]: Load(**line["load"])
        for line in lines
        if line["kind"] == "end" and line.get("load")
    }
    assert busy_points(loads, 2) == {}
    copies = {point: load.copy_s for point, load in loads.items() if load.copy_s}
    for point in copies if len(copies) > 2 else ():
        slow = loads[point].model_copy(update={"copy_s": 4 * median_low(copies.values())})
        assert busy_points(loads | {point: slow}, 2).keys() == {point}


def test_periods_that_a_quota_held_back_are_a_share_of_those_since(monkeypatch):
    counts = iter([(3, 10), (8, 20), (8, 20)])
    monkeypatch.setattr("labkit.machine.load.throttled_periods", lambda: next(counts))
    meter = LoadMeter()
    assert [meter.load().throttled_share, meter.load().throttled_share] == [0.5, None]


@on_ranks(3)
def test_two_ranks_answer_one_another_and_the_first_copies():
    for _ in range(2):
        probed = probe()
        if dist.get_rank() == 0:
            assert probed.keys() == {"ping_s", "exchange_s", "copy_s"}
            assert min(probed.values()) > 0
        else:
            assert probed == {}


def test_a_point_that_starts_its_processes_itself_is_not_probed():
    def worker(point):
        yield {"seconds": 1.0}

    names = {
        new: [next(iter(row)) for row in probed(worker, SimpleNamespace(fresh_ranks=new))]
        for new in (0, 1)
    }
    assert names == {0: [PROBE, "seconds"], 1: ["seconds"]}


def test_a_run_records_the_load_and_its_page_names_busy_points(tmp_path, monkeypatch):
    monkeypatch.setattr("labkit.machine.load.throttled_periods", lambda: next(periods))
    monkeypatch.setattr("labkit.machine.load.MIN_BUSY_SHARE", 99)  # whatever else runs now
    periods = ((10 * n, 10 * n) for n in range(1000))
    config = FakeConfig(actions=["fine", "raise"])
    run = measure(FAKE, config, profile="smoke", directory=tmp_path / "runs")
    assert run.header.load.throttled_share == 1
    assert run.busy.keys() == set(run.header.planned)
    lines = [json.loads(line) for line in run.path.read_text().splitlines()]
    loads = [line["load"] for line in lines if line["kind"] == "end"]
    assert all(load["copy_s"] > 0 and "ping_s" not in load for load in loads)
    assert not any(PROBE in row for row in run.frame())
    assert "during 2 of 2 points: " in (page := cards.coverage(run).data)
    assert "a CPU quota" in page
    for line in lines:  # as older runs are
        line.pop("load", None)
        line |= {"beats": [[[1, 0, 0.001]]]} if line["kind"] == "end" else {}
    run.path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    older = Run.load(run.path)
    assert (older.header.load, older.busy) == (None, {})
    assert "Busy machine" not in cards.coverage(older).data
