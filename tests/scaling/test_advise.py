"""`labkit advise` as a reader meets it: answers, and many ways to ask for the impossible."""

import json
import re
import tracemalloc
from dataclasses import replace
from functools import partial
from typing import get_args

import numpy as np
import pytest

from labkit.advise.advice import advise, round_batch
from labkit.advise.explain import explain
from labkit.advise.report import report_advice, report_diagnosis
from labkit.advise.request import Options, make_request, read_options
from labkit.scaling.runs import Precision, Recompute, Shard
from tests.scaling.test_files import LLAMA

USUAL = {
    "model": "llama-3-8b",
    "gpus": "16",
    "gpu": "h100",
    "tokens_per_step": "1M",
    "sequence": "4096",
}
ROW = "gpu,gpus,layers,hidden,heads,vocab,seq_len,tp,pp,dp,micro_batch,global_batch,shard,step_s"
OWN_RUNS = [
    f"h100,8,16,2048,32,128256,4096,1,1,8,{batch},256,zero3,{step_s}"
    for batch, step_s in ((1, 4), (2, 3.7))
]
OWN_RUNS += ["h100,16,16,2048,32,128256,4096,1,1,16,2,256,zero3,2.0"]


def ask(**changes):
    return make_request(read_options(USUAL | changes))


@pytest.fixture
def run_program(command, monkeypatch, tmp_path):
    """Runs `labkit advise` in an empty folder; status, output, errors."""
    monkeypatch.chdir(tmp_path)
    return partial(command, "advise")


def _options(**changes):
    options = {name: value for name, value in (USUAL | changes).items() if value is not None}
    return [
        text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", value)
    ]


WRONG = {
    "no model": _options(model=None),
    "apply on other GPUs": [*_options(), "--apply"],
    "a model too large for here": ["--model", "llama-3-8b"],
    "options of many GPUs alone": ["--network-gbps", "100"],
    "no gpu": _options(gpu=None),
    "a model with a line break": _options(model="a\nb"),
    "half a gpu": _options(gpus="2.5"),
    "a billion gpus": _options(gpus="1000000000"),
    "runs without times": _options(calibrate="untimed.csv"),
    "predictions": _options(calibrate="predicted.csv"),
    "an option without its value": [*_options(), "--tp"],
    "unknown gpu": _options(gpu="tpu-v5"),
    "zero gpus": _options(gpus="0"),
    "gpus in other digits": _options(gpus="٨"),
    "gpus that nothing divides": _options(gpus="127", tokens_per_step="1048576"),
    "fewer tokens than a sequence": _options(tokens_per_step="1000"),
    "commas that are no thousands": _options(tokens_per_step="4,00,000"),
    "fp8 without units": _options(gpu="a100", precision="fp8"),
    "unknown framework": _options(framework="tensorflow"),
    "explained without a measurement": [*_options(), "--explain"],
    "a measurement without explaining": _options(mfu="40"),
    "two measurements": [*_options(mfu="40", tokens_per_second="1M"), "--explain"],
    "mfu above all": [*_options(mfu="140"), "--explain"],
    "no such table": _options(calibrate="none.csv"),
    "a table of another kind": _options(calibrate="other.csv"),
    "a config of another architecture": _options(model="mixtral.json"),
    "an unknown option": [*_options(), "--gpuz", "8"],
    "LoRA": [*_options(), "--lora"],
    "a bandwidth inside of one node": _options(gpus="8", measured_bus_bandwidth="40"),
}


def test_options_offer_what_the_predictor_knows(run_program):
    status, text, _ = run_program("--help")
    assert status == 0
    for name, words in (("precision", Precision), ("recompute", Recompute), ("shard", Shard)):
        words = get_args(words)
        assert [getattr(read_options({name: word}), name) for word in words] == list(words)
        assert all(word in text for word in words)
    for name in Options.model_fields:
        assert f"--{name.replace('_', '-')[:20]}" in text


@pytest.mark.parametrize(
    ("text", "number"),
    [("4M", 4e6), ("1.5b", 1.5e9), ("4,000,000", 4e6), ("1_024", 1024), ("2e6", 2e6), (8, 8)],
)
def test_numbers_are_read_as_people_write_them(text, number):
    assert read_options({"tokens_per_step": text}).tokens_per_step == number


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_question_is_one_line_status_2_and_nothing_written(case, run_program, tmp_path):
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    (tmp_path / "untimed.csv").write_text(
        "\n".join([ROW, *(row.rpartition(",")[0] + "," for row in OWN_RUNS)])
    )
    (tmp_path / "predicted.csv").write_text(
        "\n".join([f"{ROW},step_low,step_high", *(f"{row},1,9" for row in OWN_RUNS)])
    )
    (tmp_path / "mixtral.json").write_text(json.dumps(LLAMA | {"model_type": "mixtral"}))
    before = sorted(tmp_path.iterdir())
    status, out, err = run_program(*WRONG[case])
    assert status == 2
    assert len(err.strip().splitlines()) == 1, err
    assert "Traceback" not in err
    assert len(err) < 1000
    assert out == ""
    assert sorted(tmp_path.iterdir()) == before


def test_the_answer_stands_on_one_screen_with_the_verdict_first(run_program):
    status, out, err = run_program(*_options())
    assert (status, err) == (0, "")
    screen = out.splitlines()
    assert screen[0].startswith("Yes, it fits")
    assert len(screen) <= 56
    assert max(len(line) for line in screen) <= 150
    for word in (
        "tokens per second",
        "GPU-hours",
        "MFU",
        "network twice as fast",
        "(predicted)",
    ):
        assert word in out


def test_what_does_not_fit_comes_with_a_change(run_program):
    status, out, _ = run_program(*_options(model="llama-3-405b"))
    assert status == 0
    assert out.startswith("No, it does not fit")
    assert "; 75 can be used" in out.splitlines()[0]  # of 80
    assert "Change first: " in out


@pytest.mark.parametrize(
    "changes", [{}, {"model": "llama-3-70b"}, {"gpus": "256", "network_gbps": "100"}]
)
def test_advice_adds_up(changes):
    request = ask(**changes)
    advice = advise(request)
    assert advice.best
    assert all(one.out_of_memory < 0.5 for one in advice.best)
    for one in advice.best:
        assert sum(one.parts_s.values()) == pytest.approx(one.step_s)
    peak = max(sum(parts.values()) for parts in advice.first.memory_gib)
    assert peak == pytest.approx(advice.first.peak_gib)
    assert not {one.layout for one in advice.best} & {one.layout for one in advice.others}
    assert bool(advice.remedy) != advice.first.fits
    report = list(report_advice(advice))
    assert sum("(published)" in line for line in report) == 1
    assert any(line.startswith("How wrong: on the 5 nearest published runs") for line in report)


def test_a_faster_network_and_more_gpus_never_hurt():
    advice = advise(ask(network_gbps="100"))
    speed = {change.name: change.tokens_per_s for change in advice.changes}
    base = advice.request.tokens / advice.first.step_s
    assert speed["network twice as fast"] >= base > speed["network ten times slower"]
    assert speed["twice the GPUs"] > base > speed["half the GPUs"]


@pytest.mark.parametrize(
    ("tokens", "seq_len", "gpus", "sequences"),
    [
        (4e6, 8192, 64, 512),
        (4194304, 4096, 64, 1024),
        (4096 * 7, 4096, 8, 7),
        (4e6, 4096, 24, 960),
        (5000, 4096, 8, 1),
    ],
)
def test_a_batch_is_whole_and_near(tokens, seq_len, gpus, sequences):
    assert round_batch(tokens, seq_len, gpus) == sequences


def test_a_huge_batch_of_whole_sequences_is_searched_for_nothing():
    tracemalloc.start()
    assert round_batch(1e6 * 4096, 4096, 64) == 10**6
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1e5


def test_calibration_narrows_the_intervals(tmp_path):
    path = tmp_path / "runs.csv"
    path.write_text("\n".join([ROW, *OWN_RUNS]))
    calibrated = ask(**{"calibrate": str(path), "tokens_per_step": "1,048,576"})
    runs, error = re.findall(r"\d+(?:\.\d+)?", calibrated.notes[-1])
    assert int(runs) == 3
    assert float(error) < 10
    widths = [
        np.log(one.interval_90[1] / one.interval_90[0])
        for one in (advise(calibrated).first, advise(ask()).first)
    ]
    assert widths[0] < widths[1]
    # as spreadsheets may save it
    path.write_text("\n".join([ROW, *OWN_RUNS]).replace(",", ";").replace(".", ","))
    again = ask(calibrate=str(path), tokens_per_step="1M")
    assert again.notes[-1] == calibrated.notes[-1]


def _explain(**options):
    options = read_options(USUAL | {"shard": "zero3", "tp": "1", "pp": "1", "cp": "1"} | options)
    result = explain(make_request(options), options)
    return result, "\n".join(report_diagnosis(result))


def test_a_fault_that_was_put_in_explains_all_of_the_gap():
    """The MFU under each cause, given as measured, is explained by that cause."""
    result, text = _explain(mfu="3")
    assert len(result.causes) >= 5
    assert "matmuls in float32, no tensor cores" in {cause.name for cause in result.causes}
    assert max(map(len, text.splitlines())) <= 160
    for cause in result.causes:
        if 0 < cause.mfu < 0.9 * result.expected.mfu:
            again, text = _explain(mfu=str(99.99 * cause.mfu))
            (same,) = (one for one in again.causes if one.name == cause.name)
            assert again.share(same) == pytest.approx(1, abs=0.01)
            assert same.name[:40] in text


def test_a_named_option_is_no_cause():
    free = {"tokens_per_step": None, "sequence": None}
    named = {"tokens_per_step": "4M", "sequence": "4096", "micro_batch": "1", "recompute": "none"}
    before, after = (
        {one.name.split(":")[0] for one in _explain(mfu="13", **one)[0].causes}
        for one in (free, named)
    )
    gone = {"little work at once", "every layer recomputed"}
    assert gone <= before
    assert not gone & after


@pytest.mark.parametrize(
    ("speed", "verdict"), [(1.0, "As predicted"), (0.1, "Slower than predicted")]
)
def test_the_verdict_on_a_measured_speed(speed, verdict):
    result, _ = _explain(mfu="30")
    tokens_per_s = str(speed * result.request.tokens / result.expected.step_s)
    result, text = _explain(tokens_per_second=tokens_per_s)
    assert text.startswith(verdict)
    assert result.mfu == pytest.approx(speed * result.expected.mfu)
    assert (
        f"over the peak with sparsity, twice the dense one            {50 * result.mfu:.1f}" in text
    )


def test_recomputation_is_counted_where_every_layer_recomputes():
    result, _ = _explain(mfu="30", recompute="full")
    counted = result.conventions["recomputation counted (hardware FLOPs)"]
    assert counted / result.mfu == pytest.approx(4 / 3, rel=0.1)
    # The output head, a fourth of a small model's FLOPs, is not recomputed.
    small, _ = _explain(mfu="30", recompute="full", model="gpt-2")
    counted = small.conventions["recomputation counted (hardware FLOPs)"]
    assert 1.2 < counted / small.mfu < 1.3
    assert "recomputation" not in "".join(_explain(mfu="30", recompute="none")[0].conventions)


CASES = {
    "13B on two nodes of A800": (
        {"model": "llama-2-13b", "gpu": "a800", "gpus": "16", "mfu": "22"},
        (2.0, 3.5),
    ),
    "7B on a node of A100": (
        {"model": "llama-2-7b", "gpu": "a100", "gpus": "8", "mfu": "38"},
        (1.2, 1.8),
    ),
    "tensor parallelism over nodes": (
        {"model": "llama-3-70b", "gpu": "h100", "gpus": "64", "mfu": "29", "tp": "16"},
        (1.4, 2.2),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_slow_run_is_called_slow_and_by_how_much(case, run_program):
    options, (least, most) = CASES[case]
    flags = [text for name, value in options.items() for text in (f"--{name}", value)]
    status, out, _ = run_program(*flags, "--explain")
    assert status == 0
    verdict = out.splitlines()[0]
    assert "low" in verdict.lower()
    numbers = [float(text) for text in re.findall(r"\d+\.\d", verdict)]
    assert numbers
    assert all(least <= number <= most for number in numbers)


def test_a_measured_bandwidth_explains_a_slow_job_by_its_network(run_program):
    options = _options(model="llama-3-8b", gpus="128", tokens_per_step="1M", framework="nemo")
    fixed = ["--shard", "none", "--tp", "1", "--pp", "1", "--cp", "1"]
    status, out, _ = run_program(
        *options, *fixed, "--explain", "--mfu", "12", "--measured-bus-bandwidth", "13"
    )
    assert status == 0
    (cause,) = (line for line in out.splitlines() if "all-reduce at 13 GB/s" in line)
    assert "expected" in cause
    assert re.search(r"up to (all|[5-9]\d%)", cause)


@pytest.mark.parametrize(
    ("changes", "nearest_words"),
    [
        ({"model": "mixtral-8x7b"}, "nearest is a dense model"),
        ({"framework": "tensorflow"}, "nearest"),
    ],
)
def test_a_refusal_names_what_is_nearest(changes, nearest_words, run_program):
    status, _, err = run_program(*_options(**changes))
    assert status == 2
    assert nearest_words in err


def test_a_missing_table_of_runs_is_named_as_labkit_predict_names_it(run_program):
    status, _, err = run_program(*_options(calibrate="none.csv"))
    assert status == 2
    assert "none.csv: No such file" in err


def test_a_faster_layout_that_surely_fits_loses_by_its_distance_alone():
    advice = advise(ask())
    best = advice.first
    other = replace(best, step_s=0.9 * best.step_s, fits=True)
    distant, risky = (
        "\n".join(report_advice(replace(advice, others=[replace(other, fits=fits)])))
        for fits in (True, False)
    )
    assert "-10%, but further from published runs" in distant
    assert re.search(r"-10%, but .* risk", risky)


def test_a_framework_may_be_named_by_one_that_is_like_it():
    named = ask(framework="Megatron-Bridge")
    assert named.framework == "nemo"
    assert "Assumed: Megatron-Bridge is like nemo." in named.notes
