"""Quantities that several labs measure: what agrees, what is flagged, and what a slow machine explains."""

import json

import pandas as pd
import pytest

from labkit.lab.agreement import PHASES, AllReduceTime, Known, ProductTime, StepTime, step_times
from labkit.lab.pages.agreement import agreement_sentence, agreement_table, agreements, known_record
from labkit.lab.project import recorded_directory
from labkit.lab.runs.store import Run
from labkit.studies import LABS, load_lab
from tests.lab.test_index import index, write_page

POINT = {"point": "a", "rank": 0, "world_size": 1, "scheduling": "batch", "device": "cpu"}
NANO = POINT | {"size": "nano", "batch": 4, "context_length": 64.0, "precision": "float32"}


def _record(middle_s, *, n=9, is_bytes=False, **setting):
    """A page's record with one product, whose samples are 2 % wide."""
    samples = pd.DataFrame({"repeat": range(n), "seconds": [middle_s * (1 + 0.005 * (i % 5 - 2)) for i in range(n)]})
    rows = samples.assign(**POINT | {"size": 64, "dtype": "float32"} | setting)
    ((key, _, values),) = Known(ProductTime, rows).samples({"a": 2})
    middle, has_interval = float(values.median()), n >= 6
    low, high = (float(values.min()), float(values.max())) if has_interval else (None, None)
    about = {"key": key.__dict__ | {"quantity": key.name}, "words": key.words(), "is_bytes": is_bytes, "place": ""}
    known = [about | {"value": middle, "low": low, "high": high}]
    return {"known": known}


@pytest.mark.parametrize(
    ("first", "second", "verdict"),
    [
        (_record(1.0), _record(1.01), "agree"),
        (_record(1.0), _record(1.5), "differ"),
        (_record(1.5), _record(1.0), "differ"),
        (_record(1.0), _record(1.5, is_bytes=True), "differ"),
        (_record(1.0), _record(1.5, n=5), "too few repeats"),
    ],
)
def test_two_labs_agree_unless_no_interval_explains_the_gap(first, second, verdict):
    (row,) = agreements({"one": first, "other": second})
    assert row.verdict == verdict
    if verdict == "differ":
        assert row.ratio == pytest.approx(1.5)


@pytest.mark.parametrize("other", [{"size": 65}, {"dtype": "bfloat16"}, {"world_size": 2}, {"scheduling": "default"}])
def test_what_is_not_the_same_quantity_is_not_compared(other):
    assert agreements({"one": _record(1.0), "other": _record(1.5, **other)}) == []


def test_a_step_is_the_sum_of_its_phases_in_repeats_that_have_all():
    samples = [(phase, repeat, 10.0**i) for i, phase in enumerate(PHASES) for repeat in range(2)][:-1]
    rows = pd.DataFrame(samples, columns=["part", "repeat", "seconds"]).assign(**NANO)
    found = {key: list(values) for key, _, values in step_times(rows, "AdamW").samples({"a": 2})}
    about = {name: value for name, value in NANO.items() if name not in ("point", "rank")} | {"threads": 2}

    def step(part, optimizer=""):
        return StepTime(**about | {"context_length": 64, "part": part, "optimizer": optimizer})

    assert found[step("step", "AdamW")] == [111.0]
    assert found[step("forward and backward")] == [11.0, 11.0]
    assert found[step("forward")] == [1.0, 1.0]
    assert found[step("optimizer", "AdamW")] == [100.0]


def test_rows_without_a_part_of_the_key_are_refused():
    rows = pd.DataFrame([POINT | {"size": 64, "seconds": 1.0, "repeat": 0}])
    with pytest.raises(ValueError, match="dtype of ProductTime"):
        list(Known(ProductTime, rows).samples({"a": 2}))


def test_limits_and_all_reduce_name_the_same_all_reduces():
    exchange = POINT | {"world_size": 2, "sweep": "exchange", "n_bytes": 1024, "repeat": 0, "seconds": 1.0}
    ways = [("gloo", "all-reduce"), ("gloo", "recursive doubling"), ("shared memory", "all-reduce")]
    limits = pd.DataFrame([exchange | {"way": way, "what": what} for way, what in ways])
    timed = exchange | {"backend": "gloo", "dtype": "float32", "sweep": "transports"}
    names = [("torch", "torch"), ("recursive_doubling", "messages"), ("chosen", "shared"), ("chosen", "messages")]
    all_reduce = pd.DataFrame([timed | {"algorithm": name, "transport": over} for name, over in names])
    assert _keys("limits", limits) == _keys("all_reduce", all_reduce)
    assert len(_keys("limits", limits)) == len(ways)


def _keys(lab, frame):
    found = (known for known in load_lab(lab).known(frame) if known.kind is AllReduceTime)
    return {key for known in found for key, *_ in known.samples({"a": 1})}


@pytest.mark.parametrize("lab", LABS)
def test_a_run_without_rows_measures_nothing_shared(lab):
    found = load_lab(lab).known(pd.DataFrame())
    assert [value for known in found for value in known.samples({})] == []


@pytest.fixture(scope="module")
def recorded():
    """What a page of each recorded run leaves for the index, as a page carries it."""
    runs = [Run.load(path) for path in sorted(recorded_directory().glob("*/*.jsonl"))]
    records = {run.header.lab: {"known": known_record(load_lab(run.header.lab), run)} for run in runs}
    return json.loads(json.dumps(records, allow_nan=False))


def test_recorded_runs_share_what_they_should_and_each_pair_agrees_or_is_flagged(recorded):
    rows = agreements(recorded)
    labs = {row.quantity: {value.lab for value in row.values} for row in rows}

    def shared_by(*wanted):
        return [quantity for quantity, found in labs.items() if found >= set(wanted)]

    assert {words.split(",")[1] for words in shared_by("end_to_end", "precision")} >= {" forward"}
    assert {words.split(",")[1] for words in shared_by("end_to_end", "kernels")} >= {" step", " inference"}
    assert {words.split(",")[0] for words in shared_by("all_reduce", "limits")} == {"all-reduce"}
    assert any(words.startswith("peak memory, step") for words in labs)
    for row in rows:
        told = [value for value in row.values if value.low is not None]
        assert row.verdict == ("too few repeats" if len(told) < 2 else row.verdict)
        gaps = [a.low > b.high and a.value >= 1.03 * b.value for a in told for b in told]
        assert (row.verdict == "differ") == any(gaps)
    flagged = sum(row.verdict == "differ" for row in rows)
    assert agreement_sentence(rows).startswith(f"{len(rows) - flagged} of {len(rows)} quantities")


def test_the_index_lists_both_values_beside_one_another_and_flags_the_gap(tmp_path):
    record = _record(1.0)
    record["known"] += _record(1.5)["known"]
    write_page(tmp_path, **record)
    html = index(tmp_path)
    assert "0 of 1 quantity measured more than once agree." in html
    assert all(text in html for text in ("differ, 1.5 times", "matrix product, size 64, float32, cpu, 2 threads"))
    write_page(tmp_path)  # one of an older page says nothing
    assert "measured more than once" not in index(tmp_path)


def test_the_table_names_each_lab_with_its_value():
    table = agreement_table(agreements({"one": _record(1.0), "other": _record(2.0)}))
    one, other = table.loc[0, "measured"].split(" · ")
    assert one.startswith("one: ")
    assert other.startswith("other: ")
