"""A run and a report within a time: which points are left out, and how labs share it."""

import math
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest

from labkit.lab.calibration import LIMITS
from labkit.lab.config import ParameterError
from labkit.lab.pages.report import plan_report
from labkit.lab.pages.report_time import PAGE_S, ReportTime
from labkit.lab.point import START_S
from labkit.lab.project import runs_directory
from labkit.lab.runs import budget
from labkit.lab.runs.budget import (
    Budget,
    expected_lab_seconds,
    expected_seconds,
    slowness,
    with_more_rounds,
)
from labkit.lab.runs.measure import measure
from labkit.lab.runs.progress import Progress
from labkit.machine.description import describe_machine
from labkit.studies import LABS, load_lab
from labkit.studies.tuned_step.worker import COMPILE_S
from tests.lab.fake_lab import FAKE, FakeConfig, FakePoint
from tests.pages.cells import recorded


def fake_points(*actions):
    return [FakePoint(action=action, size=size) for size, action in enumerate(actions)]


def test_the_longest_points_go_first_and_the_last_of_its_kind_only_if_it_must():
    points = fake_points("a", "a", "a", "b")
    expected = dict(zip((point.id for point in points), [1.0, 2.0, 3.0, 9.0], strict=True))

    def kept(seconds):
        excluded = Budget(seconds, expected).exclude(points)
        return [expected[point.id] for point in points if point.id not in excluded]

    assert kept(15.0) == [1.0, 2.0, 3.0, 9.0]
    assert kept(14.0) == [1.0, 2.0, 9.0]
    assert kept(10.5) == [1.0, 9.0]
    assert kept(5.0) == [1.0]
    assert kept(0.5) == []


@pytest.mark.parametrize("share", [0.3, 0.6, 1.0])
@pytest.mark.parametrize("pace", [0.8, 1.0, 1.15, 1.5, 3.0])
def test_no_lab_misses_its_budget_by_more_than_15_percent(share, pace, monkeypatch):
    """Points of the recorded runs, each of which takes `pace` times as long as expected.

    How slow the machine is shows in the first point, which alone may take longer.
    """
    now = [0.0]
    monkeypatch.setattr("labkit.lab.runs.budget.time.monotonic", lambda: now[0])
    for lab in LABS:
        ends = recorded(lab).ends
        points = [FakePoint(action=id) for id in ends]
        expected = {point.id: ends[point.action].elapsed_s for point in points}
        now[0] = 0.0
        limit = Budget(share * sum(expected.values()), expected, _start=0.0)
        excluded = limit.exclude(points)
        took = []
        for point in points:
            if point.id not in excluded and limit.has_time_for(point):
                took.append(pace * expected[point.id])
                now[0] += took[-1]
                limit.count(point, took[-1])
        assert now[0] <= max(1.15 * limit.seconds, *took[:1], 0.0), lab


def test_points_that_take_longer_than_expected_leave_less_time_for_the_others():
    first, second = fake_points("a", "a")
    limit = Budget(100.0, {first.id: 10.0, second.id: 60.0})
    assert limit.has_time_for(second)
    limit.count(first, 30.0)
    assert not limit.has_time_for(second)


def test_progress_says_how_much_time_is_left():
    points = fake_points("a", "a", "a")
    first, *others = (point.id for point in points)
    limit = Budget(math.inf, {first: 10.0} | dict.fromkeys(others, 60.0))
    assert limit.exclude(points) == set()
    limit.count(points[0], 20.0)  # twice as long as expected
    progress = Progress(1, 3, "b", 20.0, "run", limit.expected_left_s(others))
    assert "about 4 min 0 s left" in progress.line()
    assert "about 3 min 0 s left" in progress.line(waited_s=60)
    assert "left" not in progress.line(waited_s=300)


def test_a_run_with_a_budget_ends_all_its_points_and_says_which_are_left_out(tmp_path, monkeypatch):
    # however slow this machine is now
    monkeypatch.setattr("labkit.lab.runs.budget.slowdown_by_others", lambda: 1.0)
    has_time_for = Budget.has_time_for
    monkeypatch.setattr(Budget, "has_time_for", lambda self, point: True)
    points = FAKE.plan(config := FakeConfig(actions=["fine"] * 4), describe_machine())
    expected = expected_seconds(FAKE, points, describe_machine())
    config = config.model_copy(update={"budget_s": 0.8 * sum(expected.values())})
    run = measure(FAKE, config, profile="quick", directory=tmp_path)
    coverage = run.coverage()
    assert coverage["status"].tolist().count("ok") == 3
    (reason,) = coverage["reason"].dropna()
    assert reason == Budget(config.budget_s, {}).reason
    monkeypatch.setattr(Budget, "has_time_for", lambda self, point: not self._measured_s)
    run = measure(
        FAKE, config.model_copy(update={"budget_s": 60.0}), profile="quick", directory=tmp_path
    )
    assert run.coverage()["status"].tolist() == ["ok", "skipped", "skipped", "skipped"]
    monkeypatch.setattr("labkit.lab.runs.budget.slowdown_by_others", lambda: 1e6)
    run = measure(
        FAKE, config.model_copy(update={"budget_s": 60.0}), profile="quick", directory=tmp_path
    )
    assert run.coverage()["status"].tolist() == ["skipped"] * 4
    monkeypatch.setattr(Budget, "has_time_for", has_time_for)
    without = measure(FAKE, FakeConfig(actions=["fine"] * 4), profile="quick", directory=tmp_path)
    assert without.coverage()["status"].tolist() == ["ok"] * 4


def test_points_take_as_long_as_when_they_were_recorded_times_how_much_slower_this_machine_is(
    monkeypatch,
):
    lab = load_lab("attention")
    machine = describe_machine()
    run = recorded("attention")
    points = lab.plan(lab.config.model_validate(run.header.config), machine)
    monkeypatch.setattr(budget, "newest_runs", lambda folder: [run])
    monkeypatch.setattr(budget, "slowness", lambda calibration, machine: 1.0)
    once = sum(expected_seconds(lab, points, machine).values())
    monkeypatch.setattr(budget, "slowness", lambda calibration, machine: 2.0)
    twice = sum(expected_seconds(lab, points, machine).values())
    measured = sum(end.elapsed_s for end in run.ends.values())
    if run.header.machine.identity != machine.identity:
        assert twice - once == pytest.approx(measured, rel=0.05)
    assert measured <= once < measured + 2 * len(points)


def test_a_point_of_several_sets_of_rounds_takes_as_long_as_the_last_time(monkeypatch):
    lab = load_lab("limits")
    run = recorded("limits")
    monkeypatch.setattr(budget, "newest_runs", lambda folder: [run])
    points = lab.plan(lab.config.model_validate(run.header.config), run.header.machine)
    exchange = [point for point in points if point.contests > 1]
    assert exchange
    expected = expected_seconds(lab, exchange, run.header.machine)
    took = {run.header.planned[id]["sweep"]: end.elapsed_s for id, end in run.ends.items()}
    for point in exchange:
        assert expected[point.id] < took[point.sweep] + START_S["cpu"] + point.rounds_s


def test_a_lab_that_plans_its_points_later_takes_as_long_as_its_recorded_run(monkeypatch):
    lab = load_lab("tuned_step")
    measured = sum(end.elapsed_s for end in recorded("tuned_step").ends.values())
    machine = describe_machine()
    monkeypatch.setattr("labkit.studies.tuned_step.lab.runs_here", lambda machine: {})
    planned = lab.plan(lab.profiles["quick"], machine)
    # on a slow machine; a fast one compiles, too, and the recorded run had a cache
    for pace, points in ((9.0, []), (9.0, planned), (2.0, [])):
        monkeypatch.setattr(budget, "slowness", lambda calibration, machine, pace=pace: pace)
        assert expected_lab_seconds(lab, points, machine) == [pytest.approx(pace * measured)]
    assert sum(expected_lab_seconds(lab, planned, machine)) >= COMPILE_S > 2 * measured
    assert expected_lab_seconds(FAKE, [], describe_machine()) == []


def test_a_machine_is_as_fast_as_itself(monkeypatch):
    calibration = recorded("all_reduce").header.calibration
    monkeypatch.setattr(budget, "newest_calibration", lambda machine: calibration)
    assert slowness(calibration, describe_machine()) == pytest.approx(1.0)
    assert slowness(None, describe_machine()) == 1.0


def test_what_a_busy_machine_took_says_nothing_of_what_it_takes(monkeypatch):
    machine = describe_machine()
    fast = recorded("all_reduce").header.calibration
    slow = [
        replace(rates, products={}, additions=[(n, 9 * s) for n, s in rates.additions])
        for rates in fast.rates
    ]
    local = replace(fast, rates=tuple(slow), is_disturbed=False)
    monkeypatch.setattr(budget, "newest_calibration", lambda machine: local)
    quiet = slowness(fast, machine)
    monkeypatch.setattr(
        budget, "newest_calibration", lambda machine: replace(local, is_disturbed=True)
    )
    assert slowness(fast, machine) == 1.0 != quiet
    lab = load_lab("attention")
    run = recorded("attention")
    header = run.header.model_copy(update={"machine": machine})
    busy = SimpleNamespace(header=header, ends=run.ends, is_busy=True)
    monkeypatch.setattr(
        budget,
        "newest_runs",
        lambda folder: [busy] if folder == runs_directory() / lab.name else [],
    )
    points = lab.plan(lab.profiles["quick"], machine)
    as_busy = expected_seconds(lab, points, machine)
    busy.is_busy = False
    assert as_busy != expected_seconds(lab, points, machine)


def test_more_seconds_are_more_time_and_more_rounds_for_every_point():
    lab = load_lab("attention")
    config = lab.profiles["quick"]
    longer = with_more_rounds(lab, config, 60.0)
    assert longer.rounds_s > config.rounds_s
    assert longer.repeats / config.repeats == pytest.approx(
        longer.rounds_s / config.rounds_s, rel=0.05
    )
    for study, its_config, more_s in ((FAKE, FakeConfig(), 60.0), (lab, config, -1.0)):
        with pytest.raises(ParameterError):
            with_more_rounds(study, its_config, more_s)


def test_labs_share_the_time_that_is_left_and_what_one_took_too_much(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("labkit.lab.pages.report_time.time.monotonic", lambda: now[0])
    times = ReportTime({"a": 100.0, "b": 50.0, "c": 50.0}, deadline=100.0 + 3 * PAGE_S)
    assert times.shares() == {"a": 50.0, "b": 25.0, "c": 25.0}
    now[0] = 70.0 + PAGE_S
    assert times.shares("b") == {"b": 15.0, "c": 15.0}
    whole = ReportTime({LIMITS: 60.0, "b": 50.0}, deadline=100.0 + 2 * PAGE_S)
    now[0] = 0.0
    assert whole.shares() == {LIMITS: 60.0, "b": 40.0}
    now[0] = 1000.0
    assert all(0 < share <= 1 for share in times.shares("b").values())
    now[0] = 0.0
    few = ReportTime(
        {"a": 300.0, "b": 100.0}, deadline=100.0 + 2 * PAGE_S, shortest={"a": 3.0, "b": 40.0}
    )
    # b has two points: with a quarter of the time it would measure none of them.
    assert 40.0 < few.shares()["b"] < 80.0
    assert sum(few.shares().values()) == pytest.approx(100.0)
    short = replace(few, deadline=45.0 + 2 * PAGE_S).shares()
    assert short["a"] > 3.0
    assert sum(short.values()) == pytest.approx(45.0)
    # c has a single point, and would take nearly all of the time
    names = ["a", "b", "c", "d", "e", "f"]
    large = ReportTime(
        dict.fromkeys(names, 90.0),
        deadline=100.0 + 6 * PAGE_S,
        shortest=dict.fromkeys(names, 2.0) | {"c": 90.0},
    )
    assert large.shares()["c"] <= 1.0
    assert large.shares()["a"] == pytest.approx(20.0)
    totals = [ReportTime({"a": seconds}).total_s for seconds in (1.0, 2.0, 3.0)]
    assert all(one < other for one, other in pairwise(totals))


def test_points_are_named_by_what_they_do_not_have_in_common():
    points = [FakePoint(action="fine", size=size) for size in (1, 2)]
    assert points[0].title_among(points) != points[1].title_among(points)
    assert "fine" not in points[0].title_among(points)
    assert points[0].title_among(points[:1]) == points[0].title()


def test_limits_are_shortened_and_other_labs_get_their_share(tmp_path, monkeypatch):
    monkeypatch.setattr("labkit.lab.pages.report_time.time.monotonic", lambda: 0.0)
    pages = plan_report([load_lab(LIMITS), load_lab("attention")], {"profile": "quick"}, tmp_path)
    expected = {LIMITS: 30.0, "attention": 60.0}
    short, shared = map(ReportTime(expected, deadline=60.0 + 2 * PAGE_S).limit, pages)
    assert short.parameters["config"]["repeats"] < pages[0].config.repeats
    assert "budget_s" not in short.parameters["config"]
    # what is left once the limits have ended, here at once
    assert shared.parameters["config"]["budget_s"] == pytest.approx(60.0 + PAGE_S)
    assert ReportTime(expected, deadline=1000.0).limit(pages[0]) == pages[0]
    assert ReportTime(expected).limit(pages[1]) == pages[1]
