"""Findings of the all-reduce lab on made-up frames: textbook, contrary, noisy, and with rows missing."""

from dataclasses import replace
from functools import partial
from math import nan

import numpy as np
import pandas as pd
import pytest

from labkit.costs.calibration import ALL_REDUCE, BURST, MESSAGE, Transport
from labkit.costs.communication import AlphaBeta, MessageCost
from labkit.parallel.collectives import ALGORITHMS
from labkit.studies.all_reduce import links, tables
from labkit.studies.all_reduce.phases import PHASES
from labkit.studies.all_reduce.study import STUDY, USUAL
from tests.calibrated import made_up
from tests.studies.answering import answers_of

MODEL = AlphaBeta(1e-4, 5e-10)
# A core for every rank, and a ring's all-reduce counted as one call of torch's.
MACHINE = replace(
    made_up(cores=4),
    transports=tuple(
        Transport(way="gloo", what=what, ranks=p, alpha_s=messages * 1e-4, beta_s_per_byte=share * 5e-10)
        for p in (2, 4)
        for what, messages, share in ((ALL_REDUCE, 2 * (p - 1), 2 * (p - 1) / p), (MESSAGE, 1, 1), (BURST, 1, 1))
    ),
)
_findings = partial(answers_of, STUDY, calibration=MACHINE)

KIB, MIB = 2**10, 2**20
SIZES = [KIB, 64 * KIB, MIB, 10 * MIB, 100 * MIB]


def _textbook(algorithm, world_size, n_bytes, _scheduling):
    if algorithm in ("torch", "chosen"):
        algorithm = "ring"
    return MODEL.predict_s(ALGORITHMS[algorithm].cost(world_size, n_bytes))


# Time over torch's, of labkit's chooser over each transport, and of the floor.
ROUTES = {"torch": 1.0, "messages": 0.9, "shared": 0.2, "registered": 0.15, "floor": 0.1}
PHASE_BYTES = {"torch": 2, "messages": 1, "shared": 1}  # over those of the formula


def _frame(
    seconds=_textbook, *, more=(), routes=None, noise=0.01, repeats=12, worlds=(2, 4), sizes=SIZES, gate="ok", seed=0
):
    """Rows as a run would have them: two ranks report, the second is the slower one."""
    generator = np.random.default_rng(seed)
    names = ["torch", *USUAL, *more]
    settings = [("sizes", name, p, n, "batch") for name in names for p in worlds for n in sizes]
    settings += [("ranks", name, p, n, "batch") for name in names for p in (4, 16) for n in (4000, 400_000)]
    settings += [
        ("scheduling", name, p, 4 * KIB, policy)
        for name in ("torch", "chosen")
        for p in worlds
        for policy in ("batch", "default")
    ]
    rows = []
    for sweep, name, world_size, n_bytes, policy in settings:
        base = {"sweep": sweep, "algorithm": name, "world_size": world_size, "n_bytes": n_bytes}
        base |= {"backend": "gloo", "scheduling": policy, "error": 1e-8, "extra_bytes": 0, "scratch_bytes": 0}
        for repeat in range(repeats):
            factor = np.exp(generator.normal(0, noise))
            slowest = seconds(name, world_size, n_bytes, policy) * factor
            rows += [
                base | {"check": gate, "rank": r, "repeat": repeat, "seconds": slowest * (0.5 + r / 2)} for r in (0, 1)
            ]
    for transport, share in (routes or {}).items():
        for world_size, n_bytes in [(p, n) for p in worlds for n in sizes]:
            base = {"sweep": "transports", "transport": transport, "world_size": world_size, "n_bytes": n_bytes}
            base |= {"algorithm": transport if transport in ("torch", "floor") else "chosen", "backend": "gloo"}
            base |= {"scheduling": "batch", "check": gate}
            for repeat in range(repeats):
                took = share * _textbook("torch", world_size, n_bytes, "batch") * np.exp(generator.normal(0, noise))
                rows += [base | {"rank": r, "repeat": repeat, "seconds": took * (0.5 + r / 2)} for r in (0, 1)]
                if transport in PHASE_BYTES and world_size == 2:
                    sent = {"formula_bytes": n_bytes / 2, "sent_bytes": PHASE_BYTES[transport] * n_bytes / 2}
                    of_phase = base | {"sweep": "phases", "rank": 0, "repeat": repeat, "seconds": took / 2} | sent
                    rows += [of_phase | {"collective": phase} for phase in PHASES]
    return pd.DataFrame(rows)


def test_every_question_is_answered_from_a_full_frame():
    assert all(finding.verdict != "not measured" for finding in _findings(_frame(routes=ROUTES)).values())


@pytest.mark.parametrize(("share", "verdict"), [(0.2, "yes"), (1.0, "no clear difference"), (3.0, "no")])
def test_phases_alone_are_compared_with_torchs_and_their_bytes_with_the_formula(share, verdict):
    found = _findings(_frame(routes=ROUTES | {"shared": share}))["phases"]
    assert found.verdict == verdict
    assert "reduce-scatter 2 (labkit's 1) and all-gather 2 (labkit's 1)" in found.why


def test_the_slowest_rank_counts():
    times = tables.times(_frame(noise=0), "sizes")
    row = times[(times["algorithm"] == "ring") & (times["world_size"] == 4) & (times["n_bytes"] == MIB)].iloc[0]
    assert row["seconds"] == pytest.approx(_textbook("ring", 4, MIB, None))
    assert row["busbw_gb_per_s"] == pytest.approx(1.5 * MIB / row["seconds"] / 1e9)


def test_the_model_of_a_textbook_machine_is_found_and_its_predictions_hold():
    finding = _findings(_frame(noise=0.001))["alpha_beta"]
    assert finding.verdict == "yes"
    table = tables.fits(_frame(noise=0.001))
    assert table["alpha_s"].tolist() == pytest.approx([1e-4, 1e-4], rel=0.02)
    assert table["beta_ns_per_byte"].tolist() == pytest.approx([0.5, 0.5], rel=0.02)
    found = tables.predictions(_frame(noise=0), MACHINE)
    assert found["measured_over_predicted"].tolist() == pytest.approx([1.0] * 40)  # torch is not predicted
    assert _findings(_frame(), calibration=None)["alpha_beta"].verdict == "not measured"


def test_scheduling_that_helps_hurts_or_does_both():
    def scaled(factor_of_batch):
        return lambda name, p, n, policy: 1e-3 * (factor_of_batch(p) if policy == "batch" else 1)

    verdicts = {
        "yes": scaled(lambda p: 0.3),
        "no": scaled(lambda p: 3.0),
        "it depends": scaled(lambda p: 0.3 if p <= 4 else 3.0),
    }
    for verdict, seconds in verdicts.items():
        found = _findings(_frame(seconds, worlds=(2, 4, 6, 8)))["scheduling"]
        assert found.verdict == verdict
        assert verdict == "no" or "up to 4 KiB" in found.advice  # nothing longer was measured


def test_what_a_scheduling_policy_gains_is_told_by_ranks():
    seconds = {2: 0.5, 4: 0.125, 8: 0.2}

    def times(_name, p, _n, policy):
        return 1e-3 * (seconds.get(p, 1) if policy == "batch" else 1)

    finding = _findings(_frame(times, worlds=seconds, noise=0.001))["scheduling"]
    assert finding.also == "Where it helps, typically 2, 8 and 5 times faster with 2, 4 and 8 ranks."
    assert not any("chosen" in effect.setting for effect in finding.effects)


def _both_orders(seconds, *, drift):
    """The policies one after the other, then backwards, on a machine that gets slower by a factor each time."""
    orders = []
    for turn, policies in ((1, ("batch", "default")), (2, ("default", "batch"))):
        late = {policy: drift ** (2 * (turn - 1) + index) for index, policy in enumerate(policies)}
        frame = _frame(
            lambda *setting, late=late: seconds(*setting) * late[setting[-1]], worlds=(2, 4, 6, 8), seed=turn
        )
        orders.append(frame[frame["sweep"] == "scheduling"].assign(session=turn))
    return pd.concat(orders, ignore_index=True)


def test_a_scheduling_policy_is_not_better_for_having_been_measured_before_the_other():
    alike = _both_orders(lambda *_: 1e-3, drift=1.2)
    assert _findings(alike[alike["session"] == 1])["scheduling"].verdict == "yes"  # what one order would say
    assert _findings(alike)["scheduling"].verdict == "no clear difference"
    assert tables.batch_against_default(alike)["ratio"].tolist() == pytest.approx([1.0] * 8, rel=0.03)
    better = _both_orders(lambda *setting: 1e-3 * (0.5 if setting[-1] == "batch" else 1), drift=1.2)
    assert _findings(better)["scheduling"].verdict == "yes"


def _with_links(frame, models):
    """Pairs of ranks as a run across hosts has them: two rows a repeat, one a rank of the pair."""
    rows = []
    for link, model in models.items():
        for n_bytes in SIZES:
            base = {"sweep": "exchange", "algorithm": link, "world_size": 4, "n_bytes": n_bytes, "backend": "gloo"}
            base |= {"scheduling": "batch", "check": "ok", "seconds": model.predict_s(MessageCost(1, n_bytes))}
            rows += [base | {"rank": rank, "repeat": repeat} for repeat in range(6) for rank in (0, 1)]
    return pd.concat([frame, pd.DataFrame(rows)], ignore_index=True)


def test_links_within_and_between_hosts_are_told_apart_and_leave_the_prediction_alone():
    models = {links.WITHIN: AlphaBeta(1e-4, 5e-10), links.BETWEEN: AlphaBeta(2e-3, 8e-9)}
    frame = _with_links(_frame(), models)
    for link, expected in models.items():
        found = tables.link_models(frame)[link]["gloo", 4]
        assert found.alpha_s == pytest.approx(expected.alpha_s)
        assert found.beta_s_per_byte == pytest.approx(expected.beta_s_per_byte)
    both = (tables.predictions(rows, MACHINE) for rows in (frame, _frame()))
    pd.testing.assert_frame_equal(*both)
    told = _findings(frame)["alpha_beta"].why
    assert "gloo, 4 ranks, one pair between hosts: 2 ms per message and 125 MB/s each way." in told
    assert "gloo, 4 ranks, one pair within a host: 100 µs per message and 2 GB/s each way." in told


def test_on_one_host_there_are_no_links_to_tell_apart():
    assert tables.link_models(_frame()) == {}
    assert links.pairs_to_measure(["a"] * 4) == {}


@pytest.mark.parametrize(
    ("hosts", "pairs"),
    [
        ("ab", {links.BETWEEN: (0, 1)}),
        ("abab", {links.WITHIN: (0, 2), links.BETWEEN: (0, 1)}),
        ("aabb", {links.WITHIN: (0, 1), links.BETWEEN: (0, 2)}),
        ("abbc", {links.WITHIN: (1, 2), links.BETWEEN: (0, 1)}),
    ],
)
def test_a_pair_is_found_for_each_kind_of_link(hosts, pairs):
    assert links.pairs_to_measure(hosts) == pairs


def test_numbers_of_the_headline_come_from_the_frame():
    finding = _findings(_frame(lambda name, p, n, _: 0.001 * p * n / KIB, noise=0))["size_and_ranks"]
    assert finding.headline == "It grows from 1 KiB on; with more ranks the shortest takes 2 times as long."
    assert finding.also == "From 10 MiB to 100 MiB it grows 10 times."
    assert "4 ranks take 2 times as long as 2; each rank sends 1.5 times as many bytes" in finding.why
    assert finding.where == "torch · gloo · 2 and 4 ranks · 1 KiB to 100 MiB"


def test_a_size_up_to_which_time_is_flat_is_flat_with_all_ranks():
    def flat(_name, p, n, _policy):
        return 1e-4 * p**2 * (1 if n <= MIB else n / MIB) * (1.3 if p == 4 and n == MIB else 1)

    finding = _findings(_frame(flat, noise=0))["size_and_ranks"]
    assert finding.headline.startswith(
        "Up to 64 KiB its size hardly matters; with more ranks the shortest takes 4 times"
    )


def test_of_one_size_and_number_of_ranks_the_time_is_told():
    finding = _findings(_frame(lambda *_: 2e-3, noise=0, worlds=(2,), sizes=[KIB]))["size_and_ranks"]
    assert (finding.headline, finding.also, finding.why) == ("The shortest takes 2 ms.", None, None)


def test_a_machine_that_contradicts_the_model_is_not_talked_round():
    """Recursive doubling wins at 100 MB here, and ring at 1 KB: the reverse of what messages and bytes say."""

    def contrary(algorithm, world_size, n_bytes, policy):
        time = _textbook(algorithm, world_size, n_bytes, policy)
        if algorithm == "ring":
            return time * (0.1 if n_bytes < MIB else 5)
        return time

    frame = _frame(contrary)
    findings = _findings(frame)
    assert findings["alpha_beta"].verdict != "yes"
    assert tables.crossovers(frame, MACHINE)["prediction"].value_counts().to_dict() == {"holds": 2, "does not hold": 2}
    assert findings["ring_against_torch"].verdict == "it depends"


@pytest.mark.parametrize(
    ("predicted", "until", "start", "told"),
    [
        (500.0, 100.0, 1000.0, "holds"),
        (50.0, 100.0, 1000.0, "does not hold"),
        (None, 100.0, nan, "holds"),
        (9000.0, 100.0, nan, "holds"),
        (500.0, 100.0, nan, "open"),  # should have been seen among the sizes measured, and neither is shown ahead
        (50.0, 100.0, nan, "does not hold"),
        (500.0, nan, nan, "open"),
    ],
)
def test_a_crossover_that_nothing_shows_is_open(predicted, until, start, told):
    assert tables._crossover_holds(predicted, until, start, longest=5000.0) == told


def test_algorithms_equal_to_torch_but_for_noise_show_no_difference():
    findings = _findings(_frame(lambda name, p, n, _: 1e-3, noise=0.3, routes=dict.fromkeys(ROUTES, 1.0)))
    for name in ("ring_against_torch", "scheduling", "algorithms_against_torch", "transports"):
        assert findings[name].verdict == "no clear difference"
        assert not findings[name].significant
        assert not (findings[name].advice or "").startswith(("Where", "Let", "Run"))


@pytest.mark.parametrize("name", ["chosen", "one_shot", "ring"])
def test_a_faster_algorithm_is_the_winner_and_a_slower_one_is_not(name):
    def times(factor):
        return lambda algorithm, *rest: (factor if algorithm == name else 1) * _textbook("torch", *rest)

    fast = _findings(_frame(times(0.5), more=["one_shot"]))["algorithms_against_torch"]
    assert (fast.verdict, fast.significant) == ("yes", True)
    assert {"chosen": "labkit's all_reduce"}.get(name, name.replace("_", " ")) in fast.headline
    assert fast.advice.startswith("Where ranks share no memory, average by")
    slow = _findings(_frame(times(2), more=["one_shot"]))["algorithms_against_torch"]
    assert (slow.verdict, slow.advice) == ("no", "Keep torch's all-reduce.")


def test_advice_says_up_to_which_size_an_algorithm_is_faster_with_how_many_ranks():
    def chosen(algorithm, p, n, policy):
        is_fast = algorithm == "chosen" and n <= (64 * KIB if p == 2 else MIB)
        return (0.5 if is_fast else 1) * _textbook("torch", p, n, policy)

    finding = _findings(_frame(chosen, worlds=(2, 4, 8)))["algorithms_against_torch"]
    assert finding.advice.endswith("over messages up to 64 KiB with 2 ranks and up to 1 MiB with 4 and 8 ranks.")
    with_four = _findings(_frame(lambda name, p, *rest: chosen(name if p == 4 else "torch", p, *rest)))
    assert with_four["algorithms_against_torch"].advice.endswith("over messages up to 1 MiB with 4 ranks.")


def test_wrong_results_are_shouted():
    frame = _frame()
    frame.loc[frame["algorithm"] == "butterfly", "check"] = "wrong: error 1e+00, at most 1e-06 expected"
    assert "WRONG RESULTS, and so no times, from butterfly" in _findings(frame)["algorithms_against_torch"].caveat


def test_published_trends_hold_are_contradicted_or_not_shown():
    def published(name, p, n, _):
        return {"butterfly": 0.5, "torch": 1.0}.get(name, 2.0) * p * n

    def outcomes(frame):
        finding = _findings(frame)["published_trends"]
        return finding.verdict, {claim.outcome for claim in finding.claims}

    assert outcomes(_frame(published)) == ("yes", {"holds here"})
    texts = [claim.text for claim in _findings(_frame(published))["published_trends"].claims]
    assert "With 16 ranks and 512 KiB (here 391 KiB) torch is faster than ring" in texts
    reverse = _frame(lambda name, p, n, _: {"butterfly": 4, "torch": 3}.get(name, 1) * n**2 / p)
    assert outcomes(reverse) == ("no", {"is contradicted here"})
    assert outcomes(_frame(published, repeats=3)) == ("undecided", {"is not shown here"})


def test_shared_memory_is_recommended_where_it_is_faster_and_held_against_the_floor():
    finding = _findings(_frame(routes=ROUTES))["transports"]
    assert (
        finding.headline == "Yes: labkit's all-reduce through shared memory is 5 times faster than torch's all-reduce."
    )
    told = "At 100 MiB it takes 2 and {} times as long as bare additions and copies with 2 and 4 ranks."
    assert finding.also == told.format(2)
    assert finding.advice.startswith("Let ranks of one machine exchange")
    assert set(finding.table["transport"]) == {"messages", "shared", "registered", "floor"}
    frame = _frame(routes=ROUTES)  # only the longest vectors take their time for additions and copies
    frame.loc[(frame["transport"] == "shared") & (frame["n_bytes"] < max(SIZES)), "seconds"] *= 2
    frame.loc[(frame["transport"] == "shared") & (frame["world_size"] == 4), "seconds"] *= 3
    assert _findings(frame)["transports"].also == told.format(6)
    slower = _findings(_frame(routes=ROUTES | {"shared": 1.5}))["transports"]
    assert (slower.verdict, slower.advice) == ("no", "Keep torch's all-reduce between ranks of one machine.")


def test_each_transport_is_marked_by_its_own_ratios():
    """Shared memory is what the question is of; the others stand beside it in the table."""
    table = _findings(_frame(routes=ROUTES | {"messages": 1.0, "shared": 0.5, "registered": 2.0}))["transports"].table
    marks = table.groupby("transport")["verdict"].agg(set)
    assert marks[["messages", "shared", "registered"]].tolist() == [{"no difference shown"}, {"faster"}, {"slower"}]


def test_transports_without_shared_memory_give_the_reason():
    frame = _frame(routes={"torch": 1.0, "messages": 0.9, "floor": 0.1})
    refused = {"sweep": "transports", "algorithm": "chosen", "transport": "shared", "world_size": 2, "n_bytes": 1000}
    frame = pd.concat([frame, pd.DataFrame([refused | {"not_measured": "the ranks are on several hosts"}])])
    finding = _findings(frame)["transports"]
    assert (finding.verdict, finding.advice) == ("not measured", None)
    assert "Not measured: shared, since the ranks are on several hosts." in finding.caveat
    assert _findings(_frame(routes={}))["transports"].verdict == "not measured"
