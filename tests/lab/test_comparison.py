"""Runs side by side: what is shared, what an interval between two runs may claim, and bad input in one message."""

import json
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from jinja2.utils import htmlsafe_json_dumps

from labkit.lab.config import ParameterError
from labkit.lab.pages import compare as compare_page
from labkit.lab.pages.compare import load_runs, write_comparison
from labkit.lab.pages.export import OTHER_FORMAT, PAGE_FORMAT, RECORD_KEYS
from labkit.lab.runs.comparison import compare_runs, machine_names, overview
from labkit.lab.runs.store import Run, RunFileError
from labkit.machine import describe_machine
from tests.browser import CONTRASTS, opened_browser

EVIL = "<script>alert(1)</script>"
QUOTED = "\" onerror='alert(1)"
SIZES = (1024, 4096, 16384, 65536, 262144, 1048576)


def run_file(path, *, lab="lab", factor=1.0, sizes=SIZES, device="cpu", noise=0.02, seed=0, started=0, **machine):
    """A run of one point a size, with two algorithms each, whose times are those of the size times `factor`."""
    facts = describe_machine().model_dump(mode="json") | {"source": {"commit": "abc1234def"}} | machine
    points = {f"p{n}": {"world_size": 2, "n_elements": n // 4, "device": device, "timeout_s": 60 + seed} for n in sizes}
    header = {"kind": "header", "format_version": 1, "lab": lab, "profile": "quick", "config": {}, "machine": facts}
    header |= {"command": "labkit measure", "started": f"2026-01-01T00:0{started}:00Z", "planned": points}
    lines, generator = [header], np.random.default_rng(seed)
    for name, point in points.items():
        for rank in (0, 1):
            for algorithm, slower in (("ring", 1.0), ("torch", 2.0)):
                times = factor * slower * point["n_elements"] * 1e-8 * (1 + noise * generator.standard_normal(20))
                values = {"algorithm": algorithm, "check": "ok", "error": 0.1 * seed, "seconds": list(times)}
                lines.append({"kind": "row", "point": name, "rank": rank, "values": values})
        lines.append({"kind": "end", "point": name, "status": "ok", "reason": None, "elapsed_s": 1.0})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Run.load(path)


def write_page(path, *, run, version=PAGE_FORMAT):
    """What a page embeds, no more."""
    record = dict.fromkeys(RECORD_KEYS, "") | {"run": run}
    about = {"format_version": version, "lab": "lab", "title": "Lab", "error": None, "record": record}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'<script type="application/json" id="labkit-record">{htmlsafe_json_dumps(about)}</script>')


def test_a_machine_that_is_twice_as_fast_is_faster_at_every_shared_setting(tmp_path):
    slow = run_file(tmp_path / "a.jsonl", cpu="Slow")
    fast = run_file(tmp_path / "b.jsonl", cpu="Fast", factor=0.5, seed=1)
    (found,) = compare_runs([slow, fast])
    assert list(found.rows["verdict"]) == ["faster"] * 12
    assert found.rows["ratio"].between(0.48, 0.52).all()
    assert (found.rows["low"] < found.rows["ratio"]).all()
    assert overview([found])["verdict"].tolist() == ["faster"]
    (back,) = compare_runs([fast, slow])
    assert set(back.rows["verdict"]) == {"slower"}


def test_runs_that_differ_by_less_than_runs_of_one_machine_do_show_no_difference(tmp_path):
    first = run_file(tmp_path / "a.jsonl", cpu="One")
    other = run_file(tmp_path / "b.jsonl", cpu="Other", factor=1.1, seed=1)
    (found,) = compare_runs([first, other])
    assert (found.rows["low"] > 1.03).all()  # the intervals alone would claim it
    assert set(found.rows["verdict"]) == {"no difference shown"}
    assert found.repeat_difference is None


def test_repeated_runs_of_one_machine_say_how_much_counts_as_a_difference(tmp_path):
    first = run_file(tmp_path / "a.jsonl", cpu="One")
    quiet = run_file(tmp_path / "b.jsonl", cpu="One", factor=1.01, seed=1, started=1)
    noisy = run_file(tmp_path / "c.jsonl", cpu="One", factor=1.5, seed=2, started=2)
    other = run_file(tmp_path / "d.jsonl", cpu="Other", factor=1.2, seed=3)
    (found,) = compare_runs([first, quiet, other])
    assert 0.005 < found.repeat_difference < 0.04
    of_other = found.rows[found.rows["machine"].str.contains("Other")]
    assert set(of_other["verdict"]) == {"slower"}
    (found,) = compare_runs([first, noisy, other])
    assert found.repeat_difference > 0.4
    assert set(found.rows["verdict"]) == {"no difference shown"}


@pytest.mark.parametrize("digests", [(None, None), ("12", "34")])
def test_a_source_with_local_changes_is_no_repeat(digests, tmp_path):
    def run(seed):
        source = {"commit": "abc1234def", "dirty": True, "digest": digests[seed]}
        return run_file(tmp_path / f"{seed}.jsonl", source=source, seed=seed, factor=1 + seed / 2)

    (found,) = compare_runs([run(0), run(1)])
    assert found.repeat_difference is None
    assert set(found.rows["verdict"]) == {"slower"}


def test_the_same_modules_at_two_commits_are_a_repeat(tmp_path):
    """A commit may have changed a text only; and one of the two may be installed."""
    sources = {"commit": "abc1234def", "digest": "12"}, {"version": "0.1.0", "digest": "12"}
    runs = [run_file(tmp_path / f"{n}.jsonl", source=source, factor=1 + n / 2) for n, source in enumerate(sources)]
    (found,) = compare_runs(runs)
    assert found.repeat_difference > 0.4
    assert set(found.rows["verdict"]) == {"no difference shown"}


def _resumed_at(run, commit):
    with run.path.open("a") as file:
        file.write(json.dumps({"kind": "resumed", "git": {"commit": commit, "dirty": False}}) + "\n")
    return Run.load(run.path)


def test_a_run_that_was_resumed_at_another_commit_is_no_repeat(tmp_path):
    runs = [run_file(tmp_path / f"{seed}.jsonl", seed=seed, factor=1 + seed / 2) for seed in (0, 1)]
    same = [runs[0], _resumed_at(runs[1], "abc1234def")]
    assert compare_runs(same)[0].repeat_difference > 0.4
    (found,) = compare_runs([runs[0], _resumed_at(runs[1], "fff9999aaa")])
    assert found.repeat_difference is None
    assert [name.split(", ")[-1] for name in found.runs] == ["abc1234", "abc1234 then fff9999"]
    page = tmp_path / "compare.html"
    write_comparison([found], "labkit compare", page)
    assert ">commit abc1234def, then commit fff9999aaa<" in page.read_text()


def test_one_clear_difference_among_many_settings_is_the_only_one_claimed(tmp_path):
    """Of 60 settings one is twice as fast."""
    sizes = [1024 * n for n in range(1, 31)]
    first = run_file(tmp_path / "a.jsonl", cpu="One", sizes=sizes)
    second = run_file(tmp_path / "b.jsonl", cpu="Other", sizes=sizes, seed=1)
    lines = [json.loads(line) for line in second.path.read_text().splitlines()]
    for line in lines:
        if line["kind"] == "row" and line["point"] == "p1024" and line["values"]["algorithm"] == "ring":
            line["values"]["seconds"] = [value / 2 for value in line["values"]["seconds"]]
    second.path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (found,) = compare_runs([first, Run.load(second.path)])
    assert (found.rows["high"] < 0.6).sum() == 1
    assert (found.rows.loc[found.rows["verdict"] == "faster", "high"] < 0.6).tolist() == [True]
    assert "slower" not in set(found.rows["verdict"])


def test_few_repeats_claim_nothing(tmp_path):
    runs = [run_file(tmp_path / f"{seed}.jsonl", cpu=f"cpu {seed}", factor=1 + seed, seed=seed) for seed in (0, 1)]
    for run in runs:
        lines = [json.loads(line) for line in run.path.read_text().splitlines()]
        for line in lines:
            if line["kind"] == "row":
                line["values"]["seconds"] = line["values"]["seconds"][:4]
        run.path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (found,) = compare_runs([Run.load(run.path) for run in runs])
    assert found.rows["low"].isna().all()
    assert set(found.rows["verdict"]) == {"no difference shown"}


def test_only_shared_settings_are_compared_whatever_the_device_and_the_rest_is_listed(tmp_path):
    cpu = run_file(tmp_path / "a.jsonl", cpu="One")
    gpu = run_file(tmp_path / "b.jsonl", cpu="Other", device="cuda", sizes=(*SIZES[:4], 12345 * 4), factor=0.1, seed=1)
    (found,) = compare_runs([cpu, gpu])
    assert len(found.rows) == 4 * 2
    assert found.settings == ["n_elements", "algorithm"]
    (missing,) = found.not_shared.values()
    assert len(missing) == (2 + 1) * 2
    assert any("12345" in key for key in missing)


def test_backends_of_one_run_are_settings_of_their_own(tmp_path):
    both = run_file(tmp_path / "a.jsonl", cpu="One", sizes=SIZES[:1])
    lines = [json.loads(line) for line in both.path.read_text().splitlines()]
    point = lines[0]["planned"]["p1024"]
    lines[0]["planned"] = {"p1024": point | {"backend": "gloo"}, "nccl": point | {"backend": "nccl"}}
    lines += [line | {"point": "nccl"} for line in lines[1:]]
    paths = []
    for name in ("One", "Other"):
        lines[0]["machine"]["cpu"] = name
        paths.append(tmp_path / f"{name}.jsonl")
        paths[-1].write_text("".join(json.dumps(line) + "\n" for line in lines))
    (found,) = compare_runs([Run.load(path) for path in paths])
    assert sorted(zip(found.rows["backend"], found.rows["algorithm"], strict=True)) == [
        ("gloo", "ring"), ("gloo", "torch"), ("nccl", "ring"), ("nccl", "torch"),
    ]  # fmt: skip


def test_turns_of_several_groups_of_ranks_are_samples_of_one_setting(tmp_path):
    once, other = (
        run_file(tmp_path / f"{seed}.jsonl", cpu=f"cpu {seed}", sizes=SIZES[:1], seed=seed) for seed in (0, 1)
    )
    header, *lines = [json.loads(line) for line in other.path.read_text().splitlines()]
    header["planned"]["again"] = header["planned"]["p1024"] | {"session": 2}
    lines += [line | {"point": "again"} for line in lines]
    twice = tmp_path / "twice.jsonl"
    twice.write_text("".join(json.dumps(line) + "\n" for line in [header, *lines]))
    (found,) = compare_runs([once, Run.load(twice)])
    assert sorted(found.rows["algorithm"]) == ["ring", "torch"]
    assert found.not_shared == {next(iter(found.not_shared)): []}


def test_the_slowest_rank_counts(tmp_path):
    runs = [run_file(tmp_path / f"{seed}.jsonl", cpu=f"cpu {seed}", noise=0.0) for seed in (0, 1)]
    lines = [json.loads(line) for line in runs[1].path.read_text().splitlines()]
    for line in lines:
        if line["kind"] == "row" and line["rank"] == 1:
            line["values"]["seconds"] = [3 * value for value in line["values"]["seconds"]]
    runs[1].path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (found,) = compare_runs([runs[0], Run.load(runs[1].path)])
    assert found.rows["ratio"].round(6).eq(3).all()


def test_machines_have_the_shortest_names_that_tell_them_apart(tmp_path):
    def names(*runs):
        return [name.removeprefix("2-core ") for name in machine_names(runs).values()]

    common = {"cores": 2, "gpus": []}
    a = run_file(tmp_path / "a.jsonl", cpu="One", host="x", **common)
    b = run_file(tmp_path / "b.jsonl", cpu="Two", host="y", **common)
    c = run_file(tmp_path / "c.jsonl", cpu="One", host="z", **common)
    d = run_file(tmp_path / "d.jsonl", cpu="One", host="x", source={"commit": "fff9999aaa", "dirty": True}, **common)
    e = run_file(tmp_path / "e.jsonl", cpu="One", host="x", started=1, **common)
    assert names(a, b) == ["One", "Two"]
    assert names(a, c) == ["One, x", "One, z"]
    assert names(a, d) == ["One, abc1234", "One, fff9999+"]
    assert names(a, e) == ["One, x, abc1234, run 1", "One, x, abc1234, run 2"]
    old = run_file(tmp_path / "old.jsonl", cpu="One", host="x", source=None, **common)
    assert names(a, old) == ["One, abc1234", "One, source not recorded"]
    assert compare_page._run_table(compare_runs([a, old])[0])["source"].tolist()[1] == "not recorded"


def test_one_page_holds_many_machines_and_labs_and_escapes_what_runs_say(tmp_path):
    for machine in range(20):
        for lab in ("one", "two"):
            path = tmp_path / "runs" / f"{machine}" / f"{lab}.jsonl"
            run_file(path, lab=lab, cpu=f"CPU {machine} {EVIL}", factor=1 + machine / 4, seed=machine, sizes=SIZES[:3])
    page = tmp_path / "out" / "compare.html"
    runs, unread = load_runs([str(tmp_path / "runs")])
    assert unread == {}
    table = write_comparison(compare_runs(runs), f"labkit compare {EVIL}", page)
    assert len(table) == 2 * 19
    html = page.read_text()
    assert EVIL not in html
    assert "&lt;script&gt;" in html
    assert 'id="lab-one"' in html
    assert 'id="lab-two"' in html
    assert "may differ by more than the intervals say" in html


@pytest.mark.parametrize("evil", [EVIL, QUOTED, f"'{QUOTED}", "$x^{$", "a_b\n<b>"])
def test_nothing_that_a_run_says_becomes_markup(evil, tmp_path):
    """Names of the lab, the machine, its host and commit, and values of settings."""
    runs = []
    for number in range(2):
        source = {"commit": evil if number else "abc", "dirty": False}
        machine = {"cpu": f"{evil} {number}", "host": evil, "source": source}
        run = run_file(tmp_path / f"{number}.jsonl", lab=f"lab {evil}", seed=number, sizes=SIZES[:3], **machine)
        text = run.path.read_text().replace(json.dumps("ring"), json.dumps(evil))
        run.path.write_text(text.replace(json.dumps("torch"), json.dumps(f"other {evil}")))
        runs.append(Run.load(run.path))
    (found,) = compare_runs(runs)
    assert evil in set(found.rows["algorithm"])
    write_comparison([found], f"labkit compare {evil}", tmp_path / "compare.html", {f"a {evil}.jsonl": evil})
    reader = _Elements()
    reader.feed((tmp_path / "compare.html").read_text())
    assert reader.count("script") == 1
    assert "b" not in reader.tags
    assert not [name for name in reader.attributes if name.startswith("on") or "'" in name]
    assert [value for value in reader.anchors if value == f"lab-lab {evil}"]  # whole, within its quotes


class _Elements(HTMLParser):
    """Tags and attributes of a page as a browser reads them."""

    def __init__(self):
        super().__init__()
        self.tags, self.attributes, self.anchors = [], set(), []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attributes}
        self.anchors += [value for name, value in attributes if name == "id"]

    def count(self, tag):
        return self.tags.count(tag)


def test_labs_of_one_run_are_left_out_when_another_can_be_compared(tmp_path):
    runs = [run_file(tmp_path / f"{n}.jsonl", cpu=f"cpu {n}", lab=lab) for n, lab in enumerate(("one", "one", "two"))]
    assert [found.lab for found in compare_runs(runs)] == ["one"]


def test_nothing_to_compare_is_one_clear_message(tmp_path):
    one = run_file(tmp_path / "a.jsonl")
    with pytest.raises(ParameterError, match="at least two different runs"):
        compare_runs([one])
    with pytest.raises(ParameterError, match="at least two different runs"):
        compare_runs([one, Run.load(one.path)])
    with pytest.raises(ParameterError, match="one run each of lab, other"):
        compare_runs([one, run_file(tmp_path / "b.jsonl", lab="other")])
    with pytest.raises(ParameterError, match="share no measured setting"):
        compare_runs([one, run_file(tmp_path / "c.jsonl", cpu="Other", sizes=(7,))])


def test_what_is_no_run_is_named(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "foreign.jsonl").write_text('{"some": "thing"}\n')
    with pytest.raises(RunFileError, match="no-such-run"):
        load_runs(["no-such-run"])
    with pytest.raises(RunFileError, match=r"foreign\.jsonl: not a run"):
        load_runs([str(tmp_path / "foreign.jsonl")])
    with pytest.raises(ParameterError, match="empty: it holds no run"):
        load_runs([str(tmp_path / "empty")])


def test_times_of_zero_are_not_comparable(tmp_path):
    """Of one setting in one run, and of another in both: a ratio of them is none."""
    runs = [run_file(tmp_path / f"{n}.jsonl", cpu="One", seed=n, started=n) for n in range(2)]
    for zero, run in zip((("p1024", "p4096"), ("p4096",)), runs, strict=True):
        lines = [json.loads(line) for line in run.path.read_text().splitlines()]
        for line in lines:
            if line["kind"] == "row" and line["point"] in zero:
                line["values"]["seconds"] = [0.0] * 20
        run.path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (found,) = compare_runs([Run.load(run.path) for run in runs])
    assert len(found.rows) == (len(SIZES) - 2) * 2
    assert [len(keys) for keys in found.not_shared.values()] == [2 * 2]
    assert found.repeat_difference < 0.05


def training_file(path, *, factor, archive, **machine):
    """A run of one point a seed whose rows hold the time of one epoch each, as a number."""
    run = run_file(path, **machine)
    header = json.loads(run.path.read_text().splitlines()[0])
    point = {"world_size": 2, "archive": archive, "timeout_s": 60, "epochs": 4}
    header["planned"] = {f"s{seed}": point | {"seed": seed} for seed in range(3)}
    lines, generator = [header], np.random.default_rng(0)
    for seed in range(3):
        for rank in (0, 1):
            for epoch in range(1, 5):
                seconds = factor * (1 + 0.01 * generator.standard_normal()) * (1 if rank else 0.5)
                values = {"implementation": "ddp", "phase": "epoch", "epoch": epoch, "epoch_s": seconds, "loss": 0.1}
                lines.append({"kind": "row", "point": f"s{seed}", "rank": rank, "values": values})
        lines.append({"kind": "end", "point": f"s{seed}", "status": "ok", "reason": None, "elapsed_s": 1.0})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Run.load(path)


def test_times_recorded_one_a_row_are_compared_over_seeds_and_epochs_wherever_the_archive_lies(tmp_path):
    slow = training_file(tmp_path / "a.jsonl", factor=2.0, archive="/home/a/cifar.tar.gz", cpu="Slow")
    fast = training_file(tmp_path / "b.jsonl", factor=1.0, archive="/data/cifar.tar.gz", cpu="Fast")
    (found,) = compare_runs([slow, fast])
    (row,) = found.rows.to_dict("records")
    assert found.constant["time"] == "epoch"
    assert row["baseline_s"] == pytest.approx(2.0, rel=0.02)  # of the slowest rank
    assert row["ratio"] == pytest.approx(0.5, rel=0.02)
    assert row["verdict"] == "faster"
    assert not any(found.not_shared.values())


def test_a_run_that_was_killed_at_once_is_listed_and_the_others_are_compared(tmp_path):
    folder = tmp_path / "runs"
    for number in range(2):
        run_file(folder / f"student{number}" / "run.jsonl", cpu=f"cpu {number}", seed=number)
    (folder / "empty.jsonl").touch()
    (folder / "student0" / f"<i {QUOTED}.jsonl").write_text(f'{{"kind": "row", "point": "{EVIL[:-9]}"}}\n')
    runs, unread = load_runs([str(folder)])
    assert [Path(name).name for name in unread] == ["empty.jsonl", f"<i {QUOTED}.jsonl"]
    assert set(unread.values()) == {"not a run: it does not begin with a header line"}
    write_comparison(compare_runs(runs), "labkit compare", tmp_path / "compare.html", unread)
    html = (tmp_path / "compare.html").read_text()
    assert "empty.jsonl</code>: not a run" in html
    assert "<i " not in html
    (folder / "student1" / "run.jsonl").unlink()
    with pytest.raises(RunFileError, match=r"at least two runs, 1 can be read: .*empty\.jsonl: not a run"):
        load_runs([str(folder)])


def test_pages_of_copied_checkouts_find_their_runs_and_one_without_its_run_is_listed(tmp_path):
    for number in range(2):
        run_file(tmp_path / f"student{number}/data/runs/lab/{number}.jsonl", cpu=f"cpu {number}", seed=number)
        write_page(tmp_path / f"student{number}/reports/lab.html", run=f"data/runs/lab/{number}.jsonl")
    alone = tmp_path / "student1/reports/alone.html"
    write_page(alone, run="data/runs/lab/2.jsonl")
    old = tmp_path / "student1/reports/old.html"
    write_page(old, run="data/runs/lab/1.jsonl", version=0)
    runs, unread = load_runs([str(tmp_path / f"student{number}/reports") for number in range(2)])
    assert [run.name for run in runs] == ["0", "1"]
    assert unread == {str(alone): "its run is not here: data/runs/lab/2.jsonl", str(old): OTHER_FORMAT}


def test_repeats_of_different_runs_are_not_paired(tmp_path):
    """Both runs vary in step; paired, the ratio would be 1.5 at every repeat and its interval of no width."""
    runs = [run_file(tmp_path / f"{n}.jsonl", cpu=f"cpu {n}", factor=1 + n / 2, noise=0.4) for n in (0, 1)]
    (found,) = compare_runs(runs)
    assert ((found.rows["high"] - found.rows["low"]) > 0.2).all()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_opens_offline_fits_a_narrow_screen_and_can_be_read(scheme, tmp_path):
    runs = [run_file(tmp_path / f"{n}.jsonl", cpu=f"CPU {n}", factor=1 + n, seed=n) for n in range(3)]
    write_comparison(compare_runs(runs), "labkit compare", tmp_path / "compare.html")
    with opened_browser() as visit:
        page, requests, errors = visit(tmp_path / "compare.html", scheme, 380)
        assert page.evaluate("document.documentElement.scrollWidth") <= 380
        assert page.evaluate(CONTRASTS) == []
        assert all(page.evaluate("[...document.images].map(image => image.alt)"))
        plot = page.locator(".labkit-plot").first
        plot.press("ArrowRight")
        by_key = plot.locator(".labkit-tip").inner_text()
        spot = plot.locator(".labkit-spot").bounding_box()
        page.mouse.move(spot["x"] - 200, spot["y"])
        page.mouse.move(spot["x"] + spot["width"] / 2, spot["y"] + spot["height"] / 2)
        assert plot.locator(".labkit-tip").inner_text() == by_key != ""
        page.click("table.labkit-table thead button")  # made by the page's script, which its policy lets run
        assert page.locator("th[aria-sort=ascending]").count() == 1
    assert [url for url in requests if not url.startswith("data:")] == [(tmp_path / "compare.html").as_uri()]
    assert errors == []


def test_no_script_but_the_pages_own_runs_in_it(tmp_path):
    runs = [run_file(tmp_path / f"{n}.jsonl", cpu=f"CPU {n}", seed=n) for n in range(2)]
    page_file, foreign = tmp_path / "compare.html", "<script>document.title = 'run'</script><img onerror='alert(1)'>"
    write_comparison(compare_runs(runs), "labkit compare", page_file)
    page_file.write_text(page_file.read_text().replace("<h1>", f"{foreign}<h1>"))
    with opened_browser() as visit:
        page, _, _ = visit(page_file)
        assert page.title() == "labkit compare"
        assert page.locator("table.labkit-table thead button").count() > 0


def test_what_all_settings_share_is_told_with_its_name():
    shared = {
        "world_size": np.int64(2),
        "n_bytes": 4096,
        "scheduling": "batch",
        "seed": 0.0,
        "causal": np.False_,
        "overlapped": True,
        "sizes": [1, 2],
    }
    assert [compare_page._named(name, value) for name, value in shared.items()] == [
        "2 ranks",
        "4 KiB",
        "scheduling batch",
        "seed 0",
        "not causal",
        "overlapped",
        "sizes [1, 2]",
    ]
    assert compare_page._named("world_size", 1) == "1 rank"
