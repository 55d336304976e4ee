"""Findings of the attention lab on made-up frames: textbook, contrary, noisy, and with rows missing."""

from functools import partial

import numpy as np
import pandas as pd
import pytest

from labkit.costs.attention import explicit_peak, explicit_saved, tiled_saved
from labkit.studies.attention import tables
from labkit.studies.attention.study import STUDY
from labkit.studies.shared import attention_tables
from tests.studies.answering import answers_of

_findings = partial(answers_of, STUDY)

GIB = 2**30
SEQUENCES, HEAD_DIMS = (256, 1024, 2048, 4096), (16, 64)


def _textbook(name, phase, sequence, head_dim):
    """A fixed cost and s^2 numbers that are touched, some of them d times; compiling is slow at first."""
    factor = {"explicit": 1.0, "tiled": 0.5, "compiled": 2.0 if sequence < 1024 else 0.8}[name]
    return 1e-9 * sequence**2 * (50 + head_dim) * factor * (1 if phase == "forward" else 2)


def _frame(seconds=_textbook, *, noise=0.01, repeats=12, gate="ok", available=20 * GIB, saved=1.0, seed=0):
    generator = np.random.default_rng(seed)
    settings = [("grid", 8, s, d) for s in SEQUENCES for d in HEAD_DIMS]
    settings += [("tiling", 1, s, 64) for s in (4096, 16384)]
    rows = []
    for sweep, batch, sequence, head_dim in settings:
        names = ("explicit", "tiled", "compiled") if sweep == "grid" else ("explicit", "tiled")
        base = {"sweep": sweep, "device": "cpu", "dtype": "float32", "batch": batch, "causal": False}
        base |= {"sequence": sequence, "head_dim": head_dim, "rank": 0, "check": gate}
        for name in names:
            rows += _memory_rows(base | {"implementation": name}, available, saved)
            for repeat in range(repeats):
                for phase in ("forward", "backward"):
                    time = seconds(name, phase, sequence, head_dim) * np.exp(generator.normal(0, noise))
                    rows.append(base | {"implementation": name, "phase": phase, "repeat": repeat, "seconds": time})
    return pd.DataFrame(rows)


def _memory_rows(base, available, factor):
    size = base["batch"], base["sequence"], base["head_dim"], 4
    tiled = base["implementation"] == "tiled"
    tensors = tiled_saved(*size) if tiled else explicit_saved(*size, causal=False)
    peak = sum(tensors.values()) if tiled else sum(explicit_peak(*size, causal=False).values())
    first = {"first_call_s": 7.0} if base["implementation"] == "compiled" else {}
    yield base | {"phase": "both", "error": 1e-7, "peak_bytes": peak, "available_bytes": available} | first
    for name, n_bytes in tensors.items():
        yield base | {"phase": "saved", "tensor": name, "saved_bytes": n_bytes * factor}


def test_both_passes_take_as_long_as_one_after_the_other():
    times = attention_tables.times(_frame(noise=0.0), "grid")
    by_phase = times.pivot_table(index=["implementation", "sequence", "head_dim"], columns="phase", values="seconds")
    expected = by_phase["forward"] + by_phase["backward"]
    np.testing.assert_allclose(by_phase[attention_tables.BOTH], expected)


def test_every_question_is_answered_from_a_full_frame():
    assert all(finding.verdict != "not measured" for finding in _findings(_frame()).values())


def test_the_exponent_of_a_textbook_machine_is_two_over_all_lengths():
    laws = tables.power_laws(_frame()).query("implementation != 'compiled'")
    assert laws["exponent"].tolist() == pytest.approx([2.0] * len(laws), abs=0.02)
    assert laws["times_per_doubling"].tolist() == pytest.approx([4.0] * len(laws), abs=0.06)
    assert set(laws["from_sequence"]) == {256}
    assert (laws["low"] < 2.01).all()
    assert (laws["high"] > 1.99).all()


def test_a_range_begins_where_the_power_law_does():
    """A fixed cost, as of launching a kernel, hides the growth of short sequences."""
    frame = _frame(lambda name, phase, s, d: 5e-4 + 1e-9 * s**2, noise=0.001)
    laws = tables.power_laws(frame)
    assert set(laws["from_sequence"]) == {1024}
    assert laws["exponent"].between(1.5, 2.0).all()


def test_times_that_follow_no_power_law_are_not_given_an_exponent():
    frame = _frame(lambda name, phase, s, d: 1e-3 * (1 if s in (256, 2048) else 30))
    assert tables.power_laws(frame).empty
    assert "no power of the sequence length" in _findings(frame)["time_growth"].headline


def test_growth_comes_from_the_frame():
    finding = _findings(_frame(lambda name, phase, s, d: 1e-6 * s, noise=0))["time_growth"]
    assert finding.headline.endswith("2.0 times as long.")
    assert "head dim 16: power 1.00 from 256 tokens on" in finding.where
    assert "a head dimension of 64 is not measurably slower than one of 16" in finding.also
    wide = _findings(_frame(lambda name, phase, s, d: 1e-9 * s**2 * d, noise=0.001))["time_growth"]
    assert wide.also == "At 4096 tokens, a head dimension of 64 takes 4.0 times as long as one of 16."


def test_a_power_law_at_one_head_dimension_is_told_of_that_one():
    def seconds(name, phase, s, d):
        return 1e-9 * s**2 * (1 if d == 16 or s in (256, 2048) else 30)

    headline = _findings(_frame(seconds, noise=0.001))["time_growth"].headline
    assert headline.startswith("With head dimension 16, ")
    assert "take 4.0 times as long; with others no single power fits" in headline


def test_memory_as_predicted_is_a_yes_and_other_memory_is_a_no():
    yes = _findings(_frame())["memory_growth"]
    assert yes.verdict == "yes"
    assert yes.table.dropna()["measured_over_predicted"].eq(1).all()
    assert set(yes.table["implementation"]) == {"explicit", "tiled", "compiled"}
    assert yes.also.startswith("From 256 to 4096 tokens, with head dim 64, it grows 153 times with explicit")
    frame = _frame()
    is_refused = (frame["sequence"] == 4096) & (frame["implementation"] == "explicit")
    shorter = _findings(frame[~is_refused])["memory_growth"]
    assert shorter.also.startswith("From 256 to 2048 tokens, with head dim 64, it grows 40 times with explicit")
    no = _findings(_frame(saved=1.1))["memory_growth"]
    assert no.verdict == "no"
    assert no.table.dropna()["measured_over_predicted"].round(6).eq(1.1).all()


def test_the_end_of_memory_follows_from_what_is_available():
    finding = _findings(_frame())["out_of_memory"]
    assert "At 16384 tokens" in finding.headline
    assert "99 % of that is 3 matrices of 8 GiB" in finding.also
    assert "with a margin of 10 %, more than the 20 GiB available" in finding.where
    assert "At 65536 tokens" in _findings(_frame(available=200 * GIB))["out_of_memory"].headline
    table = finding.table.set_index("tensor")
    assert table.loc["probabilities", "bytes"] == 8 * GIB
    assert table.loc["all together", "bytes"] == table["bytes"].iloc[:-2].sum()
    assert table.loc["available", "bytes"] == 20 * GIB


def _tiling_rows(ratios, peaks=(1, 8)):
    """Rows of the tiling sweep alone: time of tiled over explicit by length; peaks of tiled and explicit in GiB."""
    frame = _frame(lambda *_: 1e-3)
    at = frame[(frame["sweep"] == "tiling") & (frame["sequence"] == 4096)]
    tiled = at["implementation"] == "tiled"
    at = at.assign(peak_bytes=at["peak_bytes"].where(at["peak_bytes"].isna(), np.where(tiled, *peaks) * GIB))
    return pd.concat(
        [at.assign(sequence=s, seconds=at["seconds"] * np.where(tiled, ratio, 1.0)) for s, ratio in ratios.items()]
    )


TILE = "Without a mask, tile float32 attention instead of building the whole matrix"


@pytest.mark.parametrize(
    ("ratios", "peaks", "verdict", "advice"),
    [
        ({4096: 0.5, 8192: 0.6}, (1, 8), "yes", f"{TILE} from 4096 tokens on."),
        ({4096: 1.0, 8192: 0.5, 16384: 0.6}, (1, 8), "yes", f"{TILE} from 4096 tokens on."),
        ({4096: 2.0, 8192: 0.5, 16384: 0.6}, (1, 8), "yes", f"{TILE} from 8192 tokens on."),
        ({4096: 2.0, 8192: 0.5, 16384: 0.6}, (9, 8), "it depends", f"{TILE} from 8192 tokens on."),
        ({4096: 1.0, 8192: 1.0}, (1, 8), "yes", f"{TILE} from 4096 tokens on."),  # for its memory alone
        ({4096: 1.0, 8192: 1.0}, (9, 8), "no", None),
        ({4096: 2.0, 8192: 2.0}, (1, 8), "yes", f"If memory is short: w{TILE[1:]} from 4096 tokens on."),
        ({4096: 2.0, 8192: 2.0}, (9, 8), "no", None),
    ],
)
def test_tiling_is_advised_from_where_it_gains(ratios, peaks, verdict, advice):
    finding = _findings(_tiling_rows(ratios, peaks))["tiling"]
    assert finding.verdict == verdict
    assert finding.lead.quantity == ("memory" if peaks == (1, 8) or verdict == "no" else "time")
    assert set(finding.table["quantity"]) == {effect.quantity for effect in finding.effects} == {"time", "memory"}
    assert len(finding.table) == len(finding.effects)
    if advice is None:
        assert finding.advice.startswith("Build the whole matrix")
    else:
        assert finding.advice == advice


def test_memory_only_is_an_answer_without_times():
    frame = _frame()
    finding = _findings(frame[(frame["sweep"] == "grid") | frame["phase"].isin(["both", "saved"])])["tiling"]
    assert (finding.verdict, {effect.quantity for effect in finding.effects}) == ("yes", {"memory"})
    assert finding.table["sequence"].tolist() == [4096, 16384]


def test_compiling_that_helps_long_sequences_only_depends():
    finding = _findings(_frame())["compiled"]
    assert finding.verdict == "it depends"
    assert finding.advice == "Compile explicit attention from 1024 tokens on."
    assert "Compiling took 7 s for the first shape" in finding.caveat


def test_compiling_that_is_faster_in_one_pass_alone_is_not_called_faster():
    def seconds(name, phase, s, d):
        return 1e-3 * ((0.5 if phase == "forward" else 2) if name == "compiled" else 1)

    finding = _findings(_frame(seconds))["compiled"]
    assert finding.verdict == "it depends"
    assert "faster than explicit attention for forward, slower for backward" in finding.headline


@pytest.mark.parametrize("frame", [_frame(lambda *_: 1e-3, noise=0.3), _frame(repeats=3)], ids=["noise", "few repeats"])
def test_noise_and_few_repeats_claim_nothing_of_times(frame):
    findings = _findings(frame)
    assert findings["compiled"].verdict in ("no clear difference", "undecided")
    assert not findings["compiled"].significant
    effects = findings["tiling"].effects
    assert {effect.verdict for effect in effects if effect.quantity == "time"} == {"no difference shown"}
    assert "less memory" in findings["tiling"].headline


def test_without_a_compiler_the_reason_is_told():
    frame = _frame()
    compiled = frame["implementation"] == "compiled"
    frame = frame[~compiled | (frame["phase"] == "both")].copy()
    frame.loc[frame["implementation"] == "compiled", "check"] = "there is no compiler"
    finding = _findings(frame)["compiled"]
    assert finding.verdict == "not measured"
    assert "No times from compiled attention: there is no compiler" in finding.caveat


def test_wrong_results_are_shouted():
    frame = _frame()
    wrong = (frame["implementation"] == "tiled") & (frame["phase"] == "both")
    frame.loc[wrong, "check"] = "wrong: error 1e+00, at most 1e-06 expected"
    assert "WRONG RESULTS, and so no times, from tiled attention" in _findings(frame)["tiling"].caveat


def test_published_trends_hold_are_contradicted_or_not_shown():
    held = _findings(_frame())["published_trends"]
    assert (held.verdict, len(held.claims)) == ("yes", 5)

    def reverse(name, phase, s, d):
        return 1e-6 * s * (0.5 if phase == "backward" else 1) * (1 if name == "explicit" else 0.5 if s < 1024 else 3)

    contrary = _findings(_frame(reverse))["published_trends"]
    assert [claim.outcome for claim in contrary.claims].count("is contradicted here") == 4  # memory is as it is
    few = _findings(_frame(repeats=3))["published_trends"]
    assert {claim.outcome for claim in few.claims[2:]} == {"is not shown here"}
