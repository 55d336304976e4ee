"""`labkit advise` as a reader meets it: answers, pages, and 50 ways to ask for the impossible."""

import json
import re
import subprocess
import sys
from functools import partial

import numpy as np
import pytest

from labkit.lab.advise import explained, report, words
from labkit.lab.advise.request import measured, read_request
from labkit.lab.advise.screen import lines
from labkit.lab.pages.html import unbroken
from labkit.lab.project import reference_directory
from labkit.scaling.advice import advise, has_room, sums_s, whole_batch
from labkit.scaling.explanation import explain
from labkit.scaling.layout import Layout
from labkit.scaling.published import load_published, nearest
from labkit.studies import LABS

USUAL = {"model": "llama-3-8b", "gpus": "16", "gpu": "h100", "tokens_per_step": "1M", "sequence": "4096"}
ROW = "gpu,gpus,layers,hidden,heads,vocab,seq_len,tp,pp,dp,micro_batch,global_batch,shard,step_s"
OWN_RUNS = [f"h100,8,16,2048,32,128256,4096,1,1,8,{batch},256,zero3,{step_s}" for batch, step_s in ((1, 4), (2, 3.7))]
OWN_RUNS += ["h100,16,16,2048,32,128256,4096,1,1,16,2,256,zero3,2.0"]
LLAMA = {
    **{"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32},
    **{"num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256},
}


@pytest.fixture(scope="module")
def published():
    return load_published(reference_directory() / "scaling")


@pytest.fixture
def run_program(command, monkeypatch, tmp_path):
    """Runs `labkit advise` in an empty folder; status, what it printed, what it complained about."""
    monkeypatch.chdir(tmp_path)
    return partial(command, "advise")


def _options(**changes):
    given = {name: value for name, value in (USUAL | changes).items() if value is not None}
    return [text for name, value in given.items() for text in (f"--{name.replace('_', '-')}", value)]


WRONG = {
    "no model": _options(model=None),
    "apply on other GPUs": [*_options(), "--apply"],
    "a model too large for here": ["--model", "llama-3-8b"],
    "options of many GPUs alone": ["--network-gbps", "100"],
    "applied to a page": ["--apply", "--output", "page.html"],
    "unknown model": _options(model="llama-9-900b"),
    "a model of 10,000 letters": _options(model="x" * 10_000),
    "model with a zero byte": _options(model="a\nb"),
    "model and sizes": _options(hidden="4096"),
    "sizes without heads": _options(model=None, layers="32", hidden="4096"),
    "hidden not divisible": _options(model=None, layers="32", hidden="4097", heads="32"),
    "kv heads not divisible": _options(model=None, layers="32", hidden="4096", heads="32", kv_heads="5"),
    "no gpu": _options(gpu=None),
    "no gpus": _options(gpus=None),
    "unknown gpu": _options(gpu="tpu-v5"),
    "gpu of another memory": _options(gpu="h100-999gb"),
    "zero gpus": _options(gpus="0"),
    "negative gpus": _options(gpus="-8"),
    "half a gpu": _options(gpus="2.5"),
    "text for gpus": _options(gpus="many"),
    "gpus nan": _options(gpus="nan"),
    "gpus infinite": _options(gpus="inf"),
    "gpus in other digits": _options(gpus="٨"),
    "a billion gpus": _options(gpus="1000000000"),
    "gpus that nothing divides": _options(gpus="127", tokens_per_step="1048576"),
    "zero per node": _options(gpus_per_node="0"),
    "no network": _options(network_gbps="0"),
    "network in words": _options(network_gbps="fast"),
    "zero tokens": _options(tokens_per_step="0"),
    "fewer tokens than a sequence": _options(tokens_per_step="1000"),
    "tokens nan": _options(tokens_per_step="NaN"),
    "zero sequence": _options(sequence="0"),
    "endless sequence": _options(sequence="1e18"),
    "another precision": _options(precision="int4"),
    "fp8 without units": _options(gpu="a100", precision="fp8"),
    "bf16 without units": _options(gpu="v100-sxm-32gb"),
    "all memory reserved": _options(memory_reserve="80GiB"),
    "memory in words": _options(memory_reserve="some"),
    "budget of nothing": _options(tokens="0"),
    "unknown framework": _options(framework="tensorflow"),
    "tp does not divide heads": _options(tp="3", gpus="12"),
    "tp over all gpus": _options(tp="64"),
    "more stages than layers": _options(gpus="64", pp="64"),
    "chunks without stages": _options(pp="1", vp="2"),
    "batch smaller than dp": _options(tokens_per_step="8192", dp="16"),
    "micro-batch does not divide": _options(dp="16", micro_batch="7"),
    "degrees do not divide": _options(tp="2", pp="3"),
    "unknown shard": _options(shard="zero9"),
    "unknown recomputation": _options(recompute="some"),
    "explained without a measurement": [*_options(), "--explain"],
    "a measurement without explaining": _options(mfu="40"),
    "mfu above all": [*_options(mfu="140"), "--explain"],
    "mfu of zero": [*_options(mfu="0"), "--explain"],
    "no such table": _options(calibrate="none.csv"),
    "a table of another kind": _options(calibrate="other.csv"),
    "two runs": _options(calibrate="two.csv"),
    "runs without times": _options(calibrate="untimed.csv"),
    "a config of another architecture": _options(model="mixtral.json"),
    "a config that is none": _options(model="broken.json"),
    "a huge config": _options(model="huge.json"),
    "no such config": _options(model="absent.json"),
    "a folder for a page": _options(output="."),
    "a page that is no page": _options(output="page.pdf"),
    "an option that is none": [*_options(), "--gpuz", "8"],
    "an option without its value": [*_options(), "--tp"],
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_question_is_one_line_status_2_and_nothing_written(case, run_program, tmp_path):
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    (tmp_path / "two.csv").write_text("\n".join([ROW, *OWN_RUNS[:2]]))
    (tmp_path / "untimed.csv").write_text("\n".join([ROW, *(row.rpartition(",")[0] + "," for row in OWN_RUNS)]))
    (tmp_path / "mixtral.json").write_text(json.dumps(LLAMA | {"model_type": "mixtral"}))
    (tmp_path / "broken.json").write_text("{'model_type': __import__('os')}")
    (tmp_path / "huge.json").write_text(" " * 2**21)
    before = sorted(tmp_path.iterdir())
    page = [] if "--output" in WRONG[case] else ["--output", "page.html"]
    status, out, err = run_program(*WRONG[case], *page)
    assert status == 2
    assert len(err.strip().splitlines()) == 1, err
    assert "Traceback" not in err
    assert len(err) < 900
    assert out == ""
    assert sorted(tmp_path.iterdir()) == before


def test_the_answer_stands_on_one_screen_with_the_verdict_first(run_program):
    status, out, err = run_program(*_options())
    assert (status, err) == (0, "")
    said = out.splitlines()
    assert said[0].startswith("Yes, it fits")
    assert len(said) <= 56
    assert max(len(line) for line in said) <= 150
    for word in ("tokens per second", "tokens per day", "GPU-hours", "MFU", "network twice as fast", "(predicted)"):
        assert word in out


def test_a_config_json_gives_the_answer_of_the_model_it_describes(run_program, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    _, named, _ = run_program(*_options())
    _, read, _ = run_program(*_options(model=str(tmp_path)))
    assert named.splitlines()[3:] == read.splitlines()[3:]


def test_a_page_is_one_file_without_requests_and_escapes_what_it_shows(run_program, tmp_path):
    folder = tmp_path / "<b>model & co"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    status, out, _ = run_program(*_options(model=str(folder), gpus="64"), "--pp", "8", "--output", "page.html")
    assert status == 0
    assert out.splitlines()[-1] == "page: page.html"
    page = (tmp_path / "page.html").read_text()
    assert not re.search(r"(src|href)=\"(?!#|data:)", page)
    assert "<b>model" not in page
    assert unbroken(out.splitlines()[0]) in page
    assert "8 of 8" in page


def test_what_does_not_fit_is_told_with_what_to_change_first(run_program):
    status, out, _ = run_program(*_options(model="llama-3-405b"))
    assert status == 0
    assert out.startswith("No, it does not fit")
    assert "Change first: " in out


def test_nothing_heavy_is_imported():
    code = (
        f"import sys; sys.argv[1:] = ['advise', *{_options()}]; from labkit.__main__ import app; app(standalone_mode=0)"
    )
    code += "; print(sorted({'torch', 'pandas', 'matplotlib', 'scipy', 'jinja2'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.stdout.splitlines()[-1] == "[]", result.stderr


@pytest.mark.parametrize("changes", [{}, {"model": "llama-3-70b"}, {"gpus": "256", "network_gbps": "100"}])
def test_advice_adds_up(changes):
    asked = read_request(USUAL | changes)
    advice = advise(asked.request)
    assert advice.best
    assert all(one.out_of_memory < 0.5 for one in advice.best)
    for one in advice.best:
        assert sum(sums_s(one).values()) == pytest.approx(one.step_s)
    peak = max(sum(parts.values()) for parts in advice.prediction.memory_gib)
    assert peak == pytest.approx(advice.first.peak_gib)
    proposed = {one.layout for one in advice.best}
    assert not proposed & {one.candidate.layout for one in advice.runners_up}
    assert {one.cause for one in advice.runners_up} <= {*words.PARTS, "memory", "unstable"}
    assert bool(advice.remedies) != has_room(advice.first)


def test_a_reserve_is_kept_free():
    free, kept = (
        advise(read_request(USUAL | {"model": "llama-3-70b", "gpus": "32", "memory_reserve": reserve}).request)
        for reserve in (None, "16GiB")
    )
    assert kept.first.peak_gib < 80 - 16 - 1
    assert kept.request.usable.memory_gib == free.request.usable.memory_gib - 16
    assert kept.first.step_s >= free.first.step_s


def test_a_faster_network_and_more_gpus_never_hurt():
    advice = advise(read_request(USUAL | {"network_gbps": "100"}).request)
    speed = {change.name: change.tokens_per_s for change in advice.changes}
    base = advice.request.tokens / advice.first.step_s
    assert speed["network twice as fast"] >= base > speed["network ten times slower"]
    assert speed["twice the GPUs"] > base > speed["half the GPUs"]


@pytest.mark.parametrize(
    ("tokens", "seq_len", "gpus", "sequences"),
    [(4e6, 8192, 64, 512), (4194304, 4096, 64, 1024), (4096 * 7, 4096, 8, 7), (4e6, 4096, 24, 960), (5000, 4096, 8, 1)],
)
def test_a_batch_is_whole_and_near(tokens, seq_len, gpus, sequences):
    assert whole_batch(tokens, seq_len, gpus) == sequences


def test_own_runs_narrow_the_intervals(tmp_path):
    path = tmp_path / "runs.csv"
    path.write_text("\n".join([ROW, *OWN_RUNS]))
    asked = read_request(USUAL | {"calibrate": str(path)})
    assert asked.calibrated_on == 3
    assert asked.calibration_error < 0.1
    widths = [
        np.log(one.interval_90[1] / one.interval_90[0])
        for one in (advise(asked.request).first, advise(read_request(USUAL).request).first)
    ]
    assert widths[0] < widths[1]


def _explained(published, **given):
    tokens_per_s, mfu = measured(given)
    asked = read_request(USUAL | {"shard": "zero3", "tp": "1", "pp": "1", "cp": "1"} | given)
    found = explain(asked.request, tokens_per_s=tokens_per_s, mfu=mfu, unnamed=asked.unnamed)
    rows = nearest(published, asked.request.run(found.expected.layout))
    return found, "\n".join(lines(explained.report(asked, found, rows)))


def test_a_fault_that_was_put_in_could_be_all_of_the_gap(published):
    """The MFU under each suspect, given as measured, is explained by that suspect, and shown with what checks it."""
    found, _ = _explained(published, mfu="3")
    assert len(found.suspects) > 10
    for suspect in found.suspects:
        if 0 < suspect.mfu < 0.9 * found.expected.mfu:
            again, text = _explained(published, mfu=str(99.99 * suspect.mfu))
            (same,) = (one for one in again.suspects if one.name == suspect.name)
            assert again.could_be_all(same) or same.is_graded  # whose worst is what was given, to a rounding
            assert again.share(same) == pytest.approx(1, abs=0.01)
            assert f"{same.name[:40]}" in text


def test_suspects_say_what_they_explain_at_most_and_how_to_check_it(published):
    found, text = _explained(published, gpus="8", model="7b", mfu="13", tokens_per_step=None, sequence=None)
    shares = [found.share(one) for one in found.suspects if not found.could_be_all(one) and not found.is_excluded(one)]
    assert shares == sorted(shares, reverse=True)
    assert all(0 <= share <= 1 for share in shares)
    assert "the sizes of llama-2-7b" in text
    assert "6.74 B parameters (32 layers of 4096" in text
    reports = [one.check.split()[-1] for one in found.suspects if one.check.startswith("labkit report")]
    assert set(reports) <= set(LABS)
    for suspect in found.suspects:
        own = suspect.mfu * found.expected.step_s / found.expected.mfu  # at its worst, never faster than predicted
        assert own <= found.expected.step_s
    said = text.splitlines()
    assert len(said) <= 56
    assert max(map(len, said)) <= 160


def test_what_is_named_is_no_suspect(published):
    free = {"gpus": "8", "tokens_per_step": None, "sequence": None, "tp": None, "pp": None, "shard": "zero1"}
    named = free | {"tokens_per_step": "4M", "sequence": "4096", "micro_batch": "1", "recompute": "none"}
    named |= {"tp": "2", "pp": "1", "dp": "4"}
    names = [
        {one.name.split(":")[0] for one in _explained(published, mfu="13", **one)[0].suspects} for one in (free, named)
    ]
    gone = {"few tokens per step", "little work at once", "an arrangement that suits less"}
    assert gone <= names[0]
    assert not names[1] & (gone | {"every layer recomputed"})


def test_tokens_of_one_gpu_are_recognized(published):
    found, _ = _explained(published, mfu="30")
    tokens_per_s = found.request.tokens / found.expected.step_s / found.request.gpus
    again, _ = _explained(published, tokens_per_second=str(tokens_per_s))
    assert again.could_be_all(again.suspects[0])
    assert again.suspects[0].check == "multiply by 16"


def test_the_step_as_predicted_is_nothing_unusual(published):
    found, _ = _explained(published, mfu="30")
    again, text = _explained(published, tokens_per_second=str(found.request.tokens / found.expected.step_s))
    assert again.is_expected
    assert again.conventions[0].mfu == pytest.approx(found.expected.mfu)
    assert text.startswith("As predicted")


def test_a_peak_with_sparsity_is_recognized_as_a_convention(published):
    found, _ = _explained(published, mfu="30")
    tokens_per_s, percent = found.request.tokens / found.expected.step_s, 50 * found.expected.mfu
    _, text = _explained(published, tokens_per_second=str(tokens_per_s), mfu=str(percent))
    assert text.startswith("Only the convention differs: over the peak with sparsity")


def test_a_model_of_another_size_is_seen_in_figures_that_disagree(published):
    found, text = _explained(published, model="mpt-7b", tokens_per_second="1.27M", mfu="6.8")
    assert found.parameters_implied == pytest.approx(125e6, rel=0.15)
    assert "disagree" in text.splitlines()[0]


def test_published_rows_are_marked_and_the_error_on_them_is_told(published):
    asked = read_request(USUAL)
    advice = advise(asked.request)
    made = report.report(asked, advice, nearest(published, asked.request.run(advice.first.layout)))
    assert all(section.mark.startswith(("predicted", "published")) for section in made.sections)
    assert sum(section.mark.startswith("published") for section in made.sections) == 1
    assert "nearest published rows" in made.notes[0]
    for step, one in zip(made.sections[1].steps, advice.best, strict=True):
        assert sum(seconds for _, seconds in step.parts_s) == pytest.approx(one.step_s)


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        (Layout(), "one GPU"),
        (Layout(tp=2, dp=8, shard="zero1"), "tp 2, dp 8, ZeRO-1"),
        (Layout(pp=4, vp=2), "pp 4, 2 chunks per stage"),
    ],
)
def test_layouts_in_words(layout, text):
    assert words.arrangement(layout) == text
