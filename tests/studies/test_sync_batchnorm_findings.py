"""Findings of the SyncBatchNorm lab on made-up frames: textbook, contrary, noisy, and with rows missing."""

import re
from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd
import pytest

from labkit.costs.calibration import Autograd, Transport
from labkit.studies.sync_batchnorm import findings, predictions, tables
from labkit.studies.sync_batchnorm.alternatives import (
    ALL_REDUCES,
    ALONE,
    ALTERNATIVES,
    BARE,
    COLLECTIVES,
    LOCAL,
    OWN,
    TORCH,
    TWO_COLLECTIVES,
    WHOLE,
)
from labkit.studies.sync_batchnorm.study import STUDY
from labkit.studies.sync_batchnorm.worker import LAYER, PHASES
from tests.calibrated import made_up
from tests.studies.answering import answers_of

SIZES = [(32, 128), (32, 1024), (64, 128), (64, 1024)]
# Seconds of an operator, of a byte it moves, of a collective.
OPERATOR, BYTE, ALPHA = 2e-6, 1e-11, 2e-4
MACHINE = replace(
    made_up(bytes_per_s=1 / BYTE, call_s=OPERATOR),
    transports=tuple(
        Transport(way="shared memory", what=what, ranks=ranks, alpha_s=ALPHA * ranks / 2 / rounds, beta_s_per_byte=0.0)
        for what, ranks, rounds in (("a message", 2, 1), ("messages at once", 4, 1))
    ),
)
_findings = partial(answers_of, STUDY, calibration=MACHINE)
OPERATORS = {OWN: 30, TWO_COLLECTIVES: 30, ALONE: 30, LOCAL: 2, WHOLE: 2, TORCH: 6}
MESSAGES = {OWN: 1, TORCH: 1, COLLECTIVES: 1, ALL_REDUCES: 1}


def _textbook(name, phase, ranks, batch, features):
    """A collective costs a message for each two ranks, operators and bytes what they should."""
    messages = MESSAGES.get(name, 0)
    if name == TWO_COLLECTIVES:
        messages = 2 if phase == "forward" else 1
    arithmetic = OPERATORS.get(name, 0) * OPERATOR + _moved(name, ranks, batch, features) * BYTE
    return messages * ALPHA * ranks / 2 + arithmetic


def _moved(name, ranks, batch, features):
    if name in BARE:
        return 0
    return 16 * features * (batch if name == WHOLE else batch / ranks)


def _frame(seconds=_textbook, *, noise=0.002, repeats=8, sizes=SIZES, worlds=(2, 4), names=ALTERNATIVES, peak=None):
    """Rows as a run would have them: two ranks report, the second is the slower one."""
    generator = np.random.default_rng(0)
    rows = []

    def add(row, value):
        for repeat in range(repeats):
            slowest = value * np.exp(generator.normal(0, noise))
            rows.extend(
                row | {"rank": rank, "repeat": repeat, "seconds": slowest * (0.9 + rank / 10)} for rank in (0, 1)
            )

    for ranks in worlds:
        machine = {"world_size": ranks, "backend": "gloo", "device": "cpu", "check": "ok"}
        for batch, features in sizes:
            here = machine | {"sweep": LAYER, "batch": batch, "features": features}
            for name in names:
                times = {phase: seconds(name, phase, ranks, batch, features) for phase in PHASES[:2]}
                for phase, value in (times | {"both": sum(times.values())}).items():
                    ways = 2 if phase == "both" else 1
                    row = here | {"alternative": name, "phase": phase, "error": 1e-7}
                    row |= {"operators": ways * OPERATORS.get(name, np.nan)}
                    row |= {"moved_bytes": ways * _moved(name, ranks, batch, features)}
                    sent = {"forward": 8 * (2 * features + 1), "backward": 8 * features}
                    if name in BARE:
                        row |= {"sent_bytes": sent.get(phase, sum(sent.values()))}
                    add(row, value)
                if name not in BARE:
                    n_bytes = 4 * features * batch // (1 if name == WHOLE else ranks)
                    saved = {"saved_bytes": n_bytes + 16 * features, "beside_input_bytes": 16 * features}
                    peaks = {"peak_bytes": peak(name, n_bytes) if peak else 4 * n_bytes}
                    rows.append(here | {"alternative": name, "rank": 0, "repeat": 0} | saved | peaks)
    return pd.DataFrame(rows)


def test_every_question_is_answered_from_a_full_frame():
    assert all(finding.verdict != "not measured" for finding in _findings(_frame()).values())


def test_one_disturbed_setting_does_not_make_the_price():
    frame = _frame(noise=0)
    here = frame["alternative"].eq(OWN) & frame["world_size"].eq(4) & frame["features"].eq(1024) & frame["batch"].eq(64)
    disturbed = frame.assign(seconds=frame["seconds"].where(~here, 8 * frame["seconds"]))
    quiet, found = _findings(frame)["price"], _findings(disturbed)["price"]
    added = re.compile(r"\((.*?) more\)")
    assert added.findall(found.also) == added.findall(quiet.also) != []
    assert found.why == quiet.why
    assert not found.table["adds_s"].equals(quiet.table["adds_s"])  # it stays in the table


def test_the_parts_add_up_to_the_price():
    table = tables.price_table(_frame(noise=0)).set_index(["world_size", "batch", "features"]).loc[4, 64, 1024]
    assert table["collectives_s"] == pytest.approx(2 * 2 * ALPHA)
    assert table["arithmetic_s"] == pytest.approx(2 * 28 * OPERATOR)
    assert table["waiting and waking_s"] == pytest.approx(0, abs=1e-12)
    assert table["price_s"] == pytest.approx(2 * 2 * ALPHA + 2 * 28 * OPERATOR)


def test_a_textbook_machine_pays_for_messages():
    found = _findings(_frame())
    price = found["price"]
    assert (price.verdict, price.significant) == ("measured", True)
    assert price.why == "With 4 ranks instead of 2 it typically adds 1.8 times as much."
    assert price.also == "Typically 48 times with 2 ranks (512 µs more) and 97 times with 4 ranks (912 µs more)."
    assert price.advice.startswith("Synchronize only where")
    assert found["split"].headline == "Into collectives: it is the largest part in every setting."
    shown = "intervals show it in 4 of 4 settings with 2 ranks and 4 of 4 settings with 4 ranks: gloo · cpu · batch 32"
    assert found["split"].where.startswith(shown)
    assert found["one_collective"].verdict == "yes"
    assert found["prediction"].verdict == "yes"


def test_numbers_come_from_the_frame():
    finding = _findings(_frame(noise=0, sizes=[(64, 1024)], worlds=(2,)))["price"]
    assert finding.headline == "Labkit's SyncBatchNorm takes 29 times as long as plain BatchNorm."
    assert finding.also == "Typically 29 times with 2 ranks (512 µs more)."
    assert (
        finding.where
        == "the one setting measured: 2 ranks · gloo · cpu · batch 64 · 1024 features · forward and backward"
    )
    assert finding.why is None  # one size alone shows no growth
    table = tables.times(_frame(noise=0, sizes=[(64, 1024)], worlds=(2,)), alternative=OWN, phase="both")
    assert table["seconds"].tolist() == pytest.approx([530e-6], rel=0.01)


def test_the_bound_is_plain_batchnorm_and_twice_two_all_reduces():
    def seconds(name, *_):
        return 5e-4 if name == OWN else 1e-4

    assert tables.bounds(_frame(seconds, noise=0))["ratio"].tolist() == pytest.approx([5 / 3] * 8)
    assert _findings(_frame(seconds))["split"].caveat.startswith("In 8 of 8 settings a layer takes longer than")
    assert _findings(_frame())["split"].caveat is None


def test_where_arithmetic_is_the_larger_part_it_is_said():
    def slow_arithmetic(ranks_of_it):
        return lambda name, phase, ranks, *size: (
            _textbook(name, phase, ranks, *size)
            + (1e-3 if name in (OWN, TWO_COLLECTIVES, ALONE) and ranks in ranks_of_it else 0)
        )

    everywhere, with_two = (_findings(_frame(slow_arithmetic(ranks)))["split"] for ranks in ((2, 4), (2,)))
    assert everywhere.headline.startswith("Into arithmetic")
    expected = "It depends: arithmetic is the largest part with 2 ranks, collectives with 4."
    assert (with_two.verdict, with_two.headline) == ("it depends", expected)


def test_two_collectives_that_are_as_fast_as_one_or_faster_are_not_talked_round():
    def alike(name, *setting):
        return _textbook(OWN if name == TWO_COLLECTIVES else name, *setting)

    def faster(name, *setting):
        return alike(name, *setting) * (0.5 if name == TWO_COLLECTIVES else 1)

    assert _findings(_frame(alike, noise=0.02))["one_collective"].verdict == "no clear difference"
    assert _findings(_frame(faster))["one_collective"].verdict == "no"


@pytest.mark.parametrize(("high", "is_named"), [(3.0, True), (5.0, False), (float("nan"), False)])
def test_the_largest_part_is_shown_only_above_every_other_interval(high, is_named):
    """The third median has an interval that may reach higher than that of the second."""
    setting = {"world_size": 2, "backend": "gloo", "device": "cpu", "batch": 32, "features": 128}
    intervals = {
        tables.PRICE: (7.0, 6.0, 8.0),
        "collectives": (4.5, 4.0, 5.0),
        "arithmetic": (2.0, 1.9, 2.1),
        "waiting and waking": (1.0, 0.5, high),
    }
    rows = [
        setting | {"part": part, "seconds": m, "low": low, "high": top} for part, (m, low, top) in intervals.items()
    ]
    assert findings._largest_part(pd.DataFrame(rows)) == (("collectives", "1 of 1 settings") if is_named else None)


def test_noise_claims_nothing():
    found = _findings(_frame(lambda *_: 1e-3, noise=0.5))
    assert found["price"].verdict == found["one_collective"].verdict == "no clear difference"
    assert found["price"].advice == "Synchronize where it helps the model."
    assert found["price"].why is None
    assert found["split"].verdict == "undecided"


def test_too_few_repeats_claim_nothing():
    found = _findings(_frame(repeats=3, worlds=(2,)))
    assert {found[name].verdict for name in ("price", "one_collective", "against_torch")} == {"undecided"}
    assert [claim.outcome for claim in found["published_trends"].claims].count("is not shown here") == 3


@pytest.mark.parametrize(("factor", "verdict", "advice"), [(2.0, "yes", "labkit's"), (0.5, "no", "torch's")])
def test_torch_is_compared_where_it_was_measured(factor, verdict, advice):
    def seconds(name, *setting):
        return _textbook(OWN, *setting) * factor if name == TORCH else _textbook(name, *setting)

    finding = _findings(_frame(seconds))["against_torch"]
    assert (finding.verdict, finding.significant) == (verdict, True)
    assert finding.advice == f"Use {advice} SyncBatchNorm."


def test_what_torch_refuses_is_quoted():
    frame = _frame(names=[name for name in ALTERNATIVES if name != TORCH], worlds=(2,), sizes=SIZES[:1])
    refused = {"sweep": LAYER, "alternative": TORCH, "refused": "expected input tensor to be on GPU"}
    finding = _findings(pd.concat([frame, pd.DataFrame([refused])]))["against_torch"]
    assert finding.verdict == "not measured"
    assert "expected input tensor to be on GPU" in finding.caveat
    assert "why not" in _findings(frame, "why not")["against_torch"].caveat


def test_memory_is_counted():
    finding = _findings(_frame(peak=lambda name, n_bytes: n_bytes * (2 if name == OWN else 4)))["memory"]
    assert (finding.verdict, finding.significant) == ("yes", True)
    assert finding.headline == "Yes: labkit's SyncBatchNorm needs 2 times less memory than plain BatchNorm."
    assert finding.also is None


def test_memory_that_is_less_with_some_ranks_and_more_with_others_is_told_by_ranks():
    def peak(name, n_bytes):  # with four ranks each has half as many rows as with two
        return n_bytes + (0 if name == OWN else 4 * 32 * 128)

    frame = _frame(peak=peak)
    with_four = (frame["alternative"] == OWN) & (frame["world_size"] == 4)
    frame.loc[with_four, "peak_bytes"] = 1.5 * frame.loc[with_four, "peak_bytes"] + 1.5 * 4 * 32 * 128
    finding = _findings(frame)["memory"]
    assert finding.verdict == "it depends"
    assert re.fullmatch(r"Its peak differs by -\d+ to -\d+ % with 2 ranks and \+50 % with 4 ranks\.", finding.also)


def test_how_far_a_layer_without_messages_is_off_is_told_by_ranks():
    def off(factors):
        why = _findings(_frame(lambda name, phase, p, *size: factors[p] * _textbook(name, phase, p, *size), noise=0))
        told = re.findall(r"([\d.]+) (?:to [\d.]+ )?with (\d) ranks", why["prediction"].why)
        return {int(ranks): float(ratio) for ratio, ranks in told}

    as_they_are, slower = off({2: 1, 4: 1}), off({2: 4, 4: 2})
    assert slower == pytest.approx({ranks: factor * as_they_are[ranks] for ranks, factor in ((2, 4), (4, 2))}, rel=0.05)


def test_a_machine_that_costs_more_than_is_counted_contradicts_the_prediction():
    finding = _findings(_frame(lambda name, *setting: 5 * _textbook(name, *setting) + 1e-3))["prediction"]
    assert finding.verdict == "no"


def test_a_layer_is_predicted_from_its_operators_and_two_collectives():
    frame = _frame(noise=0, worlds=(2,), sizes=[(32, 128)])
    table = predictions.predictions(frame, MACHINE).set_index("alternative")
    moved = {name: 2 * _moved(name, 2, 32, 128) for name in (OWN, LOCAL)}
    with_two_ranks = 2 * BYTE  # each rank has half of the bandwidth
    own = 60 * OPERATOR + moved[OWN] * with_two_ranks + 2 * ALPHA
    assert table.loc[OWN, "predicted_s"] == pytest.approx(own, rel=0.05)
    assert table.loc[LOCAL, "predicted_s"] == pytest.approx(4 * OPERATOR + moved[LOCAL] * with_two_ranks, rel=0.1)
    assert predictions.predictions(frame.assign(backend="nccl", device="cuda"), MACHINE).empty
    assert predictions.predictions(frame, None).empty
    rates = tuple(replace(one, autograd=Autograd(begin_s=1e-4, operator_s=1e-5)) for one in MACHINE.rates)
    under = predictions.predictions(frame, replace(MACHINE, rates=rates)).set_index("alternative")
    more = 1e-4 + 4 * (1e-5 - MACHINE.of_ranks(2).call_s)
    assert (under["predicted_s"] - table["predicted_s"])[LOCAL] == pytest.approx(more)


@pytest.mark.parametrize("missing", [LOCAL, TWO_COLLECTIVES, ALONE, WHOLE, COLLECTIVES, "memory", "forward"])
def test_with_rows_missing_the_other_questions_are_answered(missing):
    frame = _frame(worlds=(2,), sizes=SIZES[:2])
    if missing == "memory":
        frame = frame[frame["saved_bytes"].isna()]
    else:
        frame = frame[(frame["alternative"] != missing) & (frame["phase"] != missing)]
    silent = {LOCAL: {"price", "split", "memory"}, TWO_COLLECTIVES: {"one_collective"}}
    silent |= {ALONE: {"split"}, COLLECTIVES: {"split"}, "memory": {"memory"}}
    silent |= {"forward": {"one_collective"}}
    found = _findings(frame)
    assert {key for key, finding in found.items() if finding.verdict == "not measured"} == silent.get(missing, set())


def test_wrong_results_are_shouted():
    bad = {"sweep": LAYER, "alternative": OWN, "check": "wrong: error 5.0e-01, at most 1.0e-04 expected", "error": 0.5}
    names = [name for name in ALTERNATIVES if name != OWN]
    finding = _findings(pd.concat([_frame(names=names), pd.DataFrame([bad])]))["price"]
    assert finding.verdict == "not measured"
    assert finding.caveat.startswith("WRONG RESULTS, and so no times, from labkit")


def _outcomes(frame):
    return [claim.outcome for claim in _findings(frame)["published_trends"].claims]


def test_the_published_trends_hold_in_the_published_numbers():
    """Fed to the lab as if measured, the self-made layer in labkit's place, they show what is claimed of them."""
    table = tables.published().set_index(["alternative", "batch", "features"])

    def seconds(name, phase, ranks, batch, features):
        which = {OWN: "self-made", TORCH: TORCH}.get(name)
        return float(table.loc[(which, batch, features), "seconds"]) / 2 if which else 1e-4

    frame = _frame(seconds, noise=0.0005, worlds=(2,))
    for name, which in ((OWN, "self-made"), (TORCH, TORCH)):
        for batch, features in SIZES:
            here = (frame["alternative"] == name) & (frame["batch"] == batch) & (frame["features"] == features)
            frame.loc[here & frame["peak_bytes"].notna(), "peak_bytes"] = table.loc[
                (which, batch, features), "peak_bytes"
            ]
    assert _outcomes(frame) == ["holds here"] * 5


def test_a_machine_that_does_the_contrary_contradicts_the_published_trends():
    def contrary(name, phase, ranks, batch, features):
        return 1e-6 * batch * features * (2 if name == OWN else 1)

    assert _outcomes(_frame(contrary, peak=lambda name, n_bytes: n_bytes**2)) == ["is contradicted here"] * 5


def test_trends_are_of_two_ranks():
    assert _findings(_frame(worlds=(4,)))["published_trends"].verdict == "not measured"


def test_a_setting_in_which_one_alternative_is_wrong_is_left_out_of_the_split():
    frame = _frame(worlds=(2,))
    wrong = (frame["alternative"] == ALONE) & (frame["batch"] == 64) & (frame["features"] == 1024)
    assert _findings(frame[~wrong])["split"].headline.startswith("Into collectives")
    nowhere_whole = frame[~((frame["alternative"] == ALONE) & (frame["batch"] == 64))]
    assert _findings(nowhere_whole)["split"].headline.startswith("Into collectives")


def test_a_price_that_may_be_zero_has_no_ratio_and_no_largest_part():
    def free(name, *_):
        return 1e-5 if name in (COLLECTIVES, ALL_REDUCES) else 1e-3

    frame = _frame(free, noise=0.02)
    assert len(tables.price_growth(frame)) < len(tables.price_growth(_frame())) / 2
    found = _findings(frame)
    assert found["price"].verdict == "no clear difference"
    assert found["split"].verdict == "undecided"
