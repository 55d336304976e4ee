"""Findings of the FlashAttention lab on made-up frames: textbook, contrary, noisy, with rows missing, with a record."""

from datetime import UTC, datetime
from functools import partial

import numpy as np
import pandas as pd
import pytest

from labkit.lab.runs.store import RunHeader
from labkit.lab.runs.writer import RunWriter
from labkit.machine import Gpu, describe_machine
from labkit.studies.flash_attention import recorded, tables
from labkit.studies.flash_attention.study import STUDY
from labkit.studies.flash_attention.worker import ALL_TECHNIQUES, CAUSAL, FULL, TECHNIQUES, FlashPoint
from labkit.studies.shared.attention_passes import TOO_SLOW
from tests.calibrated import made_up
from tests.studies.answering import answers_of

MACHINE = made_up(flops_per_s=1e12, call_s=0.0)
_findings = partial(answers_of, STUDY, calibration=MACHINE)

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

    base = {"device": "cpu", "batch": 1, "head_dim": 64, "rank": 0, "check": "ok", "causal": True}
    rows = []
    for dtype in ("float32", "bfloat16"):
        base |= {"dtype": dtype}
        for sequence in SEQUENCES:
            for name in ("explicit", "tiled", "sdpa", "flash"):
                row = base | {"sweep": "lengths", "sequence": sequence, "implementation": name}
                if name == "explicit" and sequence > explicit_until:
                    rows.append(row | {"phase": "both", "check": "needs 3 GiB, 2 GiB available"})
                elif name == "flash" and not gpu:
                    rows.append(row | {"phase": "both", "check": NO_GPU})
                else:
                    size = 64 * sequence**2 if name == "explicit" else 6400 * sequence
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
    named = frame.drop(columns=["rank", "repeat", "causal"]).groupby(["sweep", "dtype", "sequence"], sort=False)
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
                values = {"implementation": name, "phase": phase, "check": group["check"].iloc[0]}
                times = group["seconds"].dropna().tolist()
                writer.add_row(points[key], 0, values | ({"seconds": times} if times else {}))
            writer.end_point(points[key], "ok")


def _without(frame, *names):
    return frame[~frame["implementation"].isin(names)]


def test_every_question_is_answered_from_a_full_frame():
    assert all(finding.verdict != "not measured" for finding in _findings(_frame()).values())


def test_the_crossover_of_a_textbook_machine_is_found_and_advised():
    finding = _findings(_frame())["crossover"]
    assert finding.verdict == "it depends"
    assert "the Triton kernel is faster than explicit attention from 1024 tokens on, slower at 128" in finding.headline
    assert finding.advice.endswith("use the Triton kernel instead of building the whole matrix from 1024 tokens on.")
    table = tables.beats_from(_frame())
    assert set(table["from_sequence"]) == {1024}
    assert set(table["longest"]) == {4096}  # where explicit attention ends


def test_sdpas_own_choice_is_advised_where_a_backend_is_not_faster():
    def alike(name, phase, s):
        return _textbook("sdpa" if name.startswith("sdpa") else name, phase, s)

    frame = _without(_frame(alike), "flash")
    forced = frame[frame["implementation"] == "sdpa"].assign(implementation="sdpa_flash")
    forced = forced.assign(seconds=forced["seconds"] * 0.99)
    assert "use SDPA instead" in _findings(pd.concat([frame, forced]))["crossover"].advice
    faster = forced.assign(seconds=forced["seconds"] * 0.5)
    assert "use SDPA's flash backend instead" in _findings(pd.concat([frame, faster]))["crossover"].advice


def test_a_crossover_that_differs_by_dtype_is_told_and_advised_by_dtype():
    frame = _frame()
    slow = (frame["dtype"] == "bfloat16") & (frame["implementation"] != "explicit") & (frame["sequence"] == 1024)
    finding = _findings(frame.assign(seconds=frame["seconds"].where(~slow, 9.0)))["crossover"]
    assert "explicit attention from 1024 tokens on in float32 and at 4096 tokens in bfloat16" in finding.headline
    assert finding.advice.endswith("whole matrix from 1024 tokens on in float32 and at 4096 tokens in bfloat16.")
    assert finding.lead.ratio == min(effect.ratio for effect in finding.effects)
    never = (frame["dtype"] == "bfloat16") & (frame["implementation"] != "explicit")
    finding = _findings(frame.assign(seconds=frame["seconds"].where(~never, 9.0)))["crossover"]
    assert "bfloat16" not in finding.headline


def test_a_win_in_the_middle_is_told_as_one():
    def middle(name, phase, s):
        return 1e-3 * (1 if name == "explicit" or s == 4096 else 0.5)

    finding = _findings(_frame(middle))["crossover"]
    assert "up to 1024 tokens" in finding.advice
    assert tables.beats_from(_frame(middle))["from_sequence"].isna().all()


def test_a_win_at_the_longest_length_alone_is_claimed_from_there_on():
    def last(name, phase, s):
        return 1e-3 * (1 if name == "explicit" else 2 if s < 4096 else {"tiled": 1.0, "sdpa": 0.5}.get(name, 0.25))

    finding = _findings(_frame(last))["crossover"]
    assert finding.verdict == "it depends"
    assert "at 4096 tokens" in finding.advice
    starts = tables.beats_from(_frame(last)).set_index("implementation")["from_sequence"]
    assert starts["flash"].tolist() == [4096, 4096]
    assert starts["tiled"].isna().all()


def test_noise_and_few_repeats_show_no_crossover():
    for frame in (_frame(lambda *_: 1e-3, noise=0.3), _frame(repeats=3)):
        finding = _findings(frame)["crossover"]
        assert finding.verdict in ("no clear difference", "undecided")
        assert not finding.significant
        assert "use" not in (finding.advice or "")


def test_the_share_is_of_the_calibrated_matmul():
    """16384 tokens causal are 2 s^2 d operations."""
    table = tables.shares(_frame(noise=0), MACHINE)
    row = table.query("implementation == 'flash' and phase == 'forward' and sequence == 16384").iloc[0]
    rate = 2 * 16384**2 * 64 / _textbook("flash", "forward", 16384)
    assert row["tflop_per_s"] == pytest.approx(rate / 1e12)
    assert row["share_percent"] == pytest.approx(100 * rate / 1e12)
    finding = _findings(_frame(noise=0))["matmul_share"]
    assert "the Triton kernel reaches" in finding.headline
    assert "1 TFLOP/s in float32" in finding.why
    assert "above 100 %" in finding.caveat
    assert "no calibration" in _findings(_frame(), calibration=None)["matmul_share"].headline
    frame = _frame()
    halves = _findings(frame.assign(dtype=frame["dtype"].replace("bfloat16", "float16")))["matmul_share"]
    assert "No share in float16: its matmul rate was not calibrated." in halves.caveat


def test_memory_is_compared_where_explicit_attention_needs_much():
    finding = _findings(_frame())["peak_memory"]
    assert finding.verdict == "yes"
    assert {effect.quantity for effect in finding.effects} == {"memory"}
    assert set(finding.table["sequence"]) == {1024, 4096}
    assert finding.table["ratio"].tolist() == pytest.approx([100 / s for s in finding.table["sequence"]])
    assert "Explicit attention does not run at 16384 tokens: needs 3 GiB, 2 GiB available" in finding.caveat
    assert tables.reasons(_frame())["reason"].tolist() == ["needs 3 GiB, 2 GiB available"] * 2
    frame = _frame()
    is_longest = (frame["implementation"] == "explicit") & (frame["sequence"] == 16384)
    too_slow = frame.mask(is_longest, frame.assign(check=f"{TOO_SLOW}: 9 s for one pass", peak_bytes=2**34, error=1e-7))
    finding = _findings(too_slow)["peak_memory"]
    assert finding.caveat is None
    assert set(finding.table["sequence"]) == {1024, 4096, 16384}
    short = _findings(_frame().query("sequence < 1024"))["peak_memory"]
    assert (short.verdict, short.effects) == ("undecided", ())


def test_the_kernel_is_held_against_explicit_attention_and_sdpa():
    frame = _frame(explicit_until=10**9)
    forced = frame[frame["implementation"] == "sdpa"].assign(implementation="sdpa_flash")
    finding = _findings(pd.concat([frame, forced]))["triton_kernel"]
    assert "the Triton kernel is faster than explicit attention from 1024 tokens on" in finding.headline
    assert "than SDPA" in finding.also
    assert set(finding.table["baseline"]) == {"explicit", "sdpa", "sdpa_flash"}
    assert len(finding.effects) == len(finding.table)
    assert _findings(_without(frame, "explicit", "sdpa", "tiled"))["triton_kernel"].verdict == "undecided"


def test_techniques_are_held_against_their_prediction():
    finding = _findings(_frame())["techniques"]
    assert finding.verdict == "yes"
    assert "skipping hidden blocks takes" in finding.headline
    table = finding.table.set_index("technique")
    assert table["verdict"].to_dict() == {
        "exp2": "no difference shown",
        "skip_hidden": "faster",
        "mask_only_edges": "slower",
        tables.HIDDEN_TILES: "faster",
    }
    assert table["predicted"].tolist() == pytest.approx([5 / 6, 1 / 2, 3 / 4, 9 / 16])
    assert finding.also == (
        "Less than predicted: 50 % by skipping hidden blocks. More than predicted: 44 % by skipping hidden tiles in "
        "tiled attention."
    )


def test_without_a_gpu_and_without_a_record_the_reason_is_told():
    here = _frame(gpu=False)
    findings = _findings(here)
    assert findings["triton_kernel"].verdict == "not measured"
    assert NO_GPU in findings["triton_kernel"].caveat
    assert "skipping hidden tiles in tiled attention" in findings["techniques"].headline
    assert NO_GPU in findings["techniques"].caveat
    assert recorded.recorded_gpu_run() is None
    assert all(len(part) == 0 for part in tables.kernel_times(here, None))


def test_a_recorded_gpu_run_is_shown_with_its_machine_where_there_is_no_gpu(tmp_path):
    _record(tmp_path, _frame())
    run = recorded.recorded_gpu_run()
    assert run.label == "recorded, NVIDIA H300"
    here = _frame(gpu=False)
    own, rows, label = tables.kernel_times(here, run)
    assert set(own["implementation"]) == {"sdpa"}
    assert set(rows["implementation"]) == {"flash"}
    assert set(rows["sequence"]) == set(SEQUENCES)
    assert label == run.label
    findings = _findings(here)
    assert findings["triton_kernel"].verdict == "not measured"
    for name in ("triton_kernel", "techniques"):
        assert "On another machine (recorded, NVIDIA H300): " in findings[name].why
    assert "skipping hidden blocks" in findings["techniques"].why


def test_a_machine_with_the_kernel_shows_its_own(tmp_path):
    _record(tmp_path, _frame())
    own, rows, _ = tables.kernel_times(_frame(), recorded.recorded_gpu_run())
    assert set(own["implementation"]) == {"flash", "sdpa"}
    assert rows.empty
    assert _findings(_frame())["triton_kernel"].why is None


def test_a_record_without_the_kernel_is_passed_over(tmp_path):
    _record(tmp_path, _frame(gpu=False))
    assert recorded.recorded_gpu_run() is None


def test_published_trends_hold_are_contradicted_or_not_shown():
    held = _findings(_frame(explicit_until=8192))["published_trends"]
    assert held.verdict == "yes"
    assert [claim.seen for claim in held.claims][-1] == "from 16384 tokens on"
    slow = _frame(lambda name, phase, s: 1e-3 * (1 if name == "explicit" else 3), gpu=False, explicit_until=16384)
    contrary = _findings(slow)["published_trends"]
    assert contrary.verdict == "no"
    assert {claim.outcome for claim in contrary.claims} == {"is contradicted here"}


def test_the_published_table_has_its_known_oddities():
    """They are said on the page; should the table change, the page must."""
    table = tables.published().set_index(["dtype", "head_dim", "sequence", "implementation", "phase"])["seconds"]
    both = tables.BOTH
    assert table["bfloat16", 128, 65536, "flash", both] > table["bfloat16", 128, 65536, "explicit", both]
    assert ("float32", 64, 65536, "explicit", both) not in table.index
    short = table[table.index.get_level_values("sequence") < 4096].xs(("flash", "backward"), level=(3, 4))
    assert short.between(1e-3, 3.5e-3).all()
