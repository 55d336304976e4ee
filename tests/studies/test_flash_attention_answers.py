"""Answers of the FlashAttention lab on made-up frames: textbook, contrary, noisy, with rows missing, with a record."""

from datetime import UTC, datetime
from functools import partial

import numpy as np
import pandas as pd
import pytest

from labkit.lab.runs.store import RunHeader
from labkit.lab.runs.writer import RunWriter
from labkit.machine import Gpu, describe_machine
from labkit.studies.flash_attention import analysis, recorded
from labkit.studies.flash_attention.study import STUDY
from labkit.studies.flash_attention.worker import ALL_TECHNIQUES, CAUSAL, FULL, TECHNIQUES, FlashPoint
from tests.studies.answering import answers_of

_answers = partial(answers_of, STUDY)

SEQUENCES = (128, 1024, 4096, 16384)
NO_GPU = "Triton kernels need a CUDA GPU"


@pytest.fixture(autouse=True)
def _nothing_recorded(monkeypatch, tmp_path):
    monkeypatch.setattr(recorded, "recorded_directory", lambda: tmp_path)


def _textbook(name, phase, sequence):
    """Explicit is 2.5 times as slow for long sequences, and quicker to start."""
    factor = {"explicit": 1.0, "tiled": 0.4, "flash": 0.1, "sdpa": 0.2}.get(name, 0.5)
    start = 0 if name == "explicit" else 2e-4
    return (start + 1e-9 * sequence**2 * factor) * (1 if phase == "forward" else 2)


def _frame(seconds=_textbook, *, gpu=True, noise=0.01, repeats=12, explicit_until=4096, seed=0):
    generator = np.random.default_rng(seed)

    def samples(base, time):
        return [base | {"repeat": r, "seconds": time * np.exp(generator.normal(0, noise))} for r in range(repeats)]

    base = {"device": "cpu", "batch": 1, "head_dim": 64, "rank": 0, "gate": "ok"}
    rows = []
    for dtype in ("float32", "bfloat16"):
        base |= {"dtype": dtype}
        matmul = base | {"sweep": "matmul", "sequence": 1000, "implementation": "matmul", "phase": "matmul"}
        rows += samples(matmul, 0.002)
        for sequence in SEQUENCES:
            for name in ("explicit", "tiled", "sdpa", "flash"):
                row = base | {"sweep": "lengths", "sequence": sequence, "implementation": name}
                if name == "explicit" and sequence > explicit_until:
                    rows.append(row | {"phase": "both", "gate": "needs 3 GiB, 2 GiB available"})
                elif name == "flash" and not gpu:
                    rows.append(row | {"phase": "both", "gate": NO_GPU})
                else:
                    size = 4 * sequence**2 if name == "explicit" else 400 * sequence
                    rows.append(row | {"phase": "both", "peak_bytes": size, "error": 1e-7})
                    for phase in ("forward", "backward"):
                        rows += samples(row | {"phase": phase}, seconds(name, phase, sequence))
    kernel = base | {"sequence": 4096, "phase": "kernel"}
    if gpu:
        rows += samples(kernel | {"sweep": "techniques", "implementation": ALL_TECHNIQUES}, 0.001)
        for name, factor in zip(TECHNIQUES, (1.0, 1.9, 0.8), strict=True):
            rows += samples(kernel | {"sweep": "techniques", "implementation": f"without {name}"}, 0.001 * factor)
    rows += samples(kernel | {"sweep": "hidden", "implementation": FULL, "tiles": 8.0}, 0.01)
    rows += samples(kernel | {"sweep": "hidden", "implementation": CAUSAL, "tiles": 8.0}, 0.0055)
    return pd.DataFrame(rows)


def _record(directory, frame):
    """A run as if it had been measured on a GPU, in `directory`/flash_attention/."""
    gpu = Gpu(name="NVIDIA H300", memory_bytes=2**40, compute_capability="11.0", dense_bf16_peak_tflops=None)
    machine = describe_machine().model_copy(update={"gpus": [gpu]})
    named = frame.drop(columns=["rank", "repeat"]).groupby(["sweep", "dtype", "sequence"], sort=False)
    points = {
        key: FlashPoint(sweep=key[0], dtype=key[1], sequence=key[2], head_dim=64, device="cuda") for key, _ in named
    }
    planned = {point.id: point.describe() for point in points.values()}
    header = RunHeader(
        lab="flash_attention",
        profile="paper",
        config={},
        machine=machine,
        command="labkit",
        started=datetime.now(UTC),
        planned=planned,
    )
    with RunWriter.create(directory / "flash_attention", header) as writer:
        for key, rows in named:
            for (name, phase), group in rows.groupby(["implementation", "phase"]):
                values = {"implementation": name, "phase": phase, "gate": group["gate"].iloc[0]}
                times = group["seconds"].dropna().tolist()
                writer.add_row(points[key], 0, values | ({"seconds": times} if times else {}))
            writer.end_point(points[key], "ok")


def test_the_question_ids_are_the_published_ones():
    ids = [question.id for question in STUDY.questions]
    assert ids == ["crossover", "matmul_share", "peak_memory", "triton_kernel", "techniques", "published_trends"]


def test_every_question_is_answered_from_a_full_frame():
    assert all(answer.verdict != "not measured" for answer in _answers(_frame()).values())


@pytest.mark.parametrize("frame", [pd.DataFrame(), _frame().iloc[:0]], ids=["no columns", "no rows"])
def test_without_rows_every_question_is_not_measured_and_says_why(frame):
    answers = _answers(frame, "needs 51 GiB, 22 GiB available")
    assert {answer.verdict for answer in answers.values()} == {"not measured"}
    assert all("needs 51 GiB" in answer.text for answer in answers.values())


def test_the_crossover_of_a_textbook_machine_is_found_and_recommended():
    answer = _answers(_frame())["crossover"]
    assert "float32, up to 4096 tokens: explicit is beaten by flash from 1024 tokens on" in answer.text
    assert "sdpa from 1024 tokens on" in answer.text
    assert "flash from 1024 tokens on in bfloat16" in answer.recommendation


def test_sdpa_is_recommended_where_the_fastest_is_not_shown_to_be_faster():
    frame = _frame(lambda name, phase, s: _textbook("sdpa" if name != "explicit" else name, phase, s))
    assert "use sdpa from 1024 tokens on" in _answers(frame)["crossover"].recommendation


def test_a_win_in_the_middle_is_no_crossover():
    def middle(name, phase, s):
        return 1e-3 * (1 if name == "explicit" or s == 4096 else 0.5)

    answer = _answers(_frame(middle))["crossover"]
    assert answer.verdict == "no difference shown"
    assert answer.recommendation is None


def test_a_win_at_the_longest_length_alone_is_claimed_from_there_on():
    def last(name, phase, s):
        return 1e-3 * (1 if name == "explicit" else 2 if s < 4096 else {"tiled": 1.0, "sdpa": 0.5}.get(name, 0.25))

    frame = _frame(last)
    answer = _answers(frame[frame["sequence"] <= 4096])["crossover"]
    assert answer.verdict == "measured"
    assert "flash from 4096 tokens on" in answer.text
    assert "tiled" not in answer.recommendation


def test_one_compared_at_few_lengths_only_is_not_recommended_beyond_them():
    frame = _frame()
    short = frame[(frame["implementation"] != "flash") | (frame["sequence"] == 1024)]
    answer = _answers(short)["crossover"]
    assert "flash at 1024 tokens, the only or longest length it was compared at" in answer.text
    assert "flash" not in answer.recommendation


def test_noise_and_few_repeats_show_no_crossover():
    noise = _answers(_frame(lambda *_: 1e-3, noise=0.3))["crossover"]
    assert noise.verdict == "no difference shown"
    assert "none is shown to beat explicit" in noise.text
    assert not noise.is_shown
    few = _answers(_frame(repeats=3))["crossover"]
    assert few.verdict == "no difference shown"
    assert few.recommendation is None


def test_the_share_is_of_the_matmul_measured_in_the_run():
    """1000^3 x 2 operations in 2 ms are 1 TFLOP/s; 16384 tokens causal are 2 s^2 d operations."""
    table = analysis.shares(_frame(noise=0))
    row = table.query("implementation == 'flash' and phase == 'forward' and sequence == 16384").iloc[0]
    rate = 2 * 16384**2 * 64 / _textbook("flash", "forward", 16384)
    assert row["tflop_per_s"] == pytest.approx(rate / 1e12)
    assert row["share_percent"] == pytest.approx(100 * rate / 1e12)
    assert "of the 1 TFLOP/s of a large matmul" in _answers(_frame(noise=0))["matmul_share"].text


def test_what_explicit_cannot_do_is_told_with_its_reason():
    text = _answers(_frame())["peak_memory"].text
    assert "float32, 4096 tokens: tiled 1.56 MiB, sdpa 1.56 MiB, flash 1.56 MiB and explicit 64 MiB" in text
    assert "Explicit does not run at 16384 tokens: needs 3 GiB, 2 GiB available" in text
    table = analysis.reasons(_frame())
    assert table["reason"].tolist() == ["needs 3 GiB, 2 GiB available"] * 2


def test_techniques_take_a_sentence_each_with_the_shortest_and_the_longest_sequence():
    frame = _frame()
    kernels = frame["sweep"].isin(["techniques", "hidden"])
    more = [frame[kernels].assign(sequence=sequence) for sequence in (8192, 16384)]
    text = _answers(pd.concat([frame, *more]))["techniques"].text
    assert text.count("with exp2 over without") == text.count("causal over full") == 1
    assert "; at 16384 tokens 0.83 predicted at best" in text
    assert "8192" not in text


def test_the_kernel_is_held_against_all_in_one_sentence_a_setting():
    frame = _frame(explicit_until=10**9)
    sdpa = frame[frame["implementation"] == "sdpa"]
    text = _answers(pd.concat([frame, sdpa.assign(implementation="sdpa_flash")]))["triton_kernel"].text
    assert text.count("the time of the kernel is") == 2, "one a dtype"
    assert text.count("of that of explicit (faster) and") == text.count("of that of sdpa flash (") == 2


def test_techniques_on_a_gpu_are_judged_one_by_one():
    text = _answers(_frame())["techniques"].text
    assert "with exp2 over without: 0.83 predicted at best" in text
    assert "with skip hidden over without: 0.50 predicted at best, 0.5" in text
    assert "it pays" in text
    assert "mask only edges over without: 0.75 predicted at best, 1.2" in text
    assert "it costs" in text
    assert "no difference shown" in text


def test_without_a_gpu_and_without_a_record_the_page_says_so():
    answers = _answers(_frame(gpu=False))
    assert answers["triton_kernel"].verdict == "not measured"
    assert NO_GPU in answers["triton_kernel"].text
    assert "holds no run of a GPU" in answers["triton_kernel"].text
    assert "causal over full: 0.56 predicted, 0.5" in answers["techniques"].text
    assert recorded.recorded_gpu_run() is None
    rows, _ = analysis.with_recorded(_frame(gpu=False), None)
    assert rows.empty


def test_a_recorded_gpu_run_is_shown_with_its_machine_where_there_is_no_gpu(tmp_path):
    _record(tmp_path, _frame())
    run = recorded.recorded_gpu_run()
    assert run.label == "recorded, NVIDIA H300"
    here = _frame(gpu=False)
    rows, label = analysis.with_recorded(here, run)
    assert set(rows["implementation"]) == {"flash"}
    assert set(rows["sequence"]) == set(SEQUENCES)
    assert label == run.label
    answers = _answers(here)
    assert answers["triton_kernel"].verdict == "not measured"
    assert "On another machine (recorded, NVIDIA H300): bfloat16, 4096 tokens" in answers["triton_kernel"].text
    assert "On another machine (recorded, NVIDIA H300): 4096 tokens, bfloat16" in answers["techniques"].text


def test_a_machine_with_the_kernel_shows_its_own(tmp_path):
    _record(tmp_path, _frame())
    rows, _ = analysis.with_recorded(_frame(), recorded.recorded_gpu_run())
    assert rows.empty
    assert "another machine" not in _answers(_frame())["triton_kernel"].text


def test_a_record_without_the_kernel_is_passed_over(tmp_path):
    _record(tmp_path, _frame(gpu=False))
    assert recorded.recorded_gpu_run() is None


def test_published_trends_hold_are_contradicted_or_not_shown():
    held = _answers(_frame(explicit_until=8192))["published_trends"]
    assert "(here: flash): holds here" in held.text
    assert "runs out of memory where FlashAttention still runs (here from 16384 tokens): holds here" in held.text
    slow = _frame(lambda name, phase, s: 1e-3 * (1 if name == "explicit" else 3), gpu=False, explicit_until=16384)
    answer = _answers(slow)["published_trends"]
    assert answer.verdict == "no"
    assert "(here: tiled): contradicted here" in answer.text


def test_the_published_table_has_its_known_oddities():
    """They are said on the page; should the table change, the page must."""
    table = analysis.published().set_index(["dtype", "head_dim", "sequence", "implementation", "phase"])["seconds"]
    assert table["bfloat16", 128, 65536, "flash", "both"] > table["bfloat16", 128, 65536, "explicit", "both"]
    assert ("float32", 64, 65536, "explicit", "both") not in table.index
    short = table[table.index.get_level_values("sequence") < 4096].xs(("flash", "backward"), level=(3, 4))
    assert short.between(1e-3, 3.5e-3).all()
