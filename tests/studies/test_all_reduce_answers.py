"""Answers of the all-reduce lab on made-up frames: textbook, contrary, noisy, and with rows missing."""

from functools import partial

import numpy as np
import pandas as pd
import pytest

from labkit.costs.communication import ALL_REDUCE_COSTS, AlphaBeta, MessageCost
from labkit.studies.all_reduce import analysis, links
from labkit.studies.all_reduce.study import STUDY
from labkit.studies.all_reduce.worker import USUAL
from tests.studies.answering import answers_of

_answers = partial(answers_of, STUDY)

KIB, MIB = 2**10, 2**20
SIZES = [KIB, 64 * KIB, MIB, 10 * MIB, 100 * MIB]
MODEL = AlphaBeta(1e-4, 5e-10)


def _textbook(algorithm, world_size, n_bytes, _scheduling):
    if algorithm == "exchange":
        return MODEL.predict_s(MessageCost(1, n_bytes))
    if algorithm in ("torch", "chosen"):
        algorithm = "ring"
    return MODEL.predict_s(ALL_REDUCE_COSTS[algorithm](world_size, n_bytes))


# Time over torch's, of labkit's chooser over each transport, and of the floor.
ROUTES = {"torch": 1.0, "messages": 0.9, "shared": 0.2, "registered": 0.15, "floor": 0.1}


def _frame(
    seconds=_textbook, *, more=(), routes=None, noise=0.01, repeats=12, worlds=(2, 4), sizes=SIZES, gate="ok", seed=0
):
    """Rows as a run would have them: two ranks report, the second is the slower one."""
    generator = np.random.default_rng(seed)
    settings = [("exchange", "exchange", p, n, "batch") for p in worlds for n in sizes]
    names = ["torch", *USUAL, *more]
    settings += [("sizes", name, p, n, "batch") for name in names for p in worlds for n in sizes]
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
                base | {"gate": gate, "rank": r, "repeat": repeat, "seconds": slowest * (0.5 + r / 2)} for r in (0, 1)
            ]
    for transport, share in (routes or {}).items():
        for world_size, n_bytes in [(p, n) for p in worlds for n in sizes]:
            base = {"sweep": "transports", "transport": transport, "world_size": world_size, "n_bytes": n_bytes}
            base |= {"algorithm": transport if transport in ("torch", "floor") else "chosen", "backend": "gloo"}
            base |= {"scheduling": "batch", "gate": gate}
            for repeat in range(repeats):
                took = share * _textbook("torch", world_size, n_bytes, "batch") * np.exp(generator.normal(0, noise))
                rows += [base | {"rank": r, "repeat": repeat, "seconds": took * (0.5 + r / 2)} for r in (0, 1)]
    return pd.DataFrame(rows)


def test_every_question_is_answered_from_a_full_frame():
    assert all(answer.verdict != "not measured" for answer in _answers(_frame(routes=ROUTES)).values())


@pytest.mark.parametrize("frame", [pd.DataFrame(), _frame().iloc[:0]], ids=["no columns", "no rows"])
def test_without_rows_every_question_is_not_measured_and_says_why(frame):
    answers = _answers(frame, "needs 51 GiB, 22 GiB available")
    assert {answer.verdict for answer in answers.values()} == {"not measured"}
    assert all("needs 51 GiB" in answer.text for answer in answers.values())


def test_the_slowest_rank_counts():
    times = analysis.times(_frame(noise=0), "sizes")
    row = times[(times["algorithm"] == "ring") & (times["world_size"] == 4) & (times["n_bytes"] == MIB)].iloc[0]
    assert row["seconds"] == pytest.approx(_textbook("ring", 4, MIB, None))
    assert row["busbw_gb_per_s"] == pytest.approx(1.5 * MIB / row["seconds"] / 1e9)


def test_numbers_in_the_text_come_from_the_frame():
    text = _answers(_frame(lambda name, p, n, _: 0.001 * p * n / KIB, noise=0))["size_and_ranks"].text
    assert "gloo, 2 ranks: 2 ms [2 ms, 2 ms] for 1 KiB, 3 min 25 s [3 min 25 s, 3 min 25 s] for 100 MiB" in text
    assert "4 ranks take 2.0 times as long as 2; by the bytes a rank sends it would be 1.5" in text


def test_the_model_of_a_textbook_machine_is_found_and_its_predictions_hold():
    answer = _answers(_frame(noise=0.001))["alpha_beta"]
    assert answer.verdict == "yes"
    table = analysis.fit_table(_frame(noise=0.001))
    assert table["alpha_s"].tolist() == pytest.approx([1e-4, 1e-4], rel=0.02)
    assert table["beta_ns_per_byte"].tolist() == pytest.approx([0.5, 0.5], rel=0.02)
    assert analysis.predictions(_frame(noise=0))["measured_over_predicted"].tolist() == pytest.approx([1.0] * 40)


def test_a_machine_that_contradicts_the_model_is_not_talked_round():
    """Recursive doubling wins at 100 MB here, and ring at 1 KB: the reverse of what messages and bytes say."""

    def contrary(algorithm, world_size, n_bytes, policy):
        time = _textbook(algorithm, world_size, n_bytes, policy)
        if algorithm == "ring":
            return time * (0.1 if n_bytes < MIB else 5)
        return time

    assert _answers(_frame(contrary))["alpha_beta"].verdict in ("no", "mixed")
    assert _answers(_frame(contrary))["ring_against_torch"].verdict == "mixed"


def test_algorithms_equal_to_torch_but_for_noise_show_no_difference():
    answers = _answers(_frame(lambda name, p, n, _: 1e-3, noise=0.3))
    assert answers["ring_against_torch"].verdict == "no difference shown"
    assert answers["scheduling"].verdict == "no difference shown"
    assert "does not matter" in answers["scheduling"].recommendation
    assert answers["algorithms_against_torch"].verdict == "no difference shown"
    assert "no difference is shown" in answers["algorithms_against_torch"].recommendation
    for name in ("scheduling", "algorithms_against_torch"):
        assert not answers[name].is_shown
        assert "[" in answers[name].evidence


def test_one_shot_is_compared_and_drawn_where_it_was_asked_for():
    fast = _frame(
        lambda name, *rest: (0.3 if name == "one_shot" else 1) * _textbook("torch", *rest), more=["one_shot"], repeats=8
    )
    assert "one shot" in _answers(fast)["algorithms_against_torch"].text
    assert "one_shot" in analysis.ALGORITHM_ORDER  # of every figure
    assert len(analysis.predictions(fast)) == 50


def test_a_faster_chooser_is_recommended_with_its_gain_and_a_slower_one_is_not():
    fast = _answers(_frame(lambda name, *rest: (0.5 if name == "chosen" else 1) * _textbook("torch", *rest)))
    assert "faster in 10 of 10 settings (0.49 to 0.51" in fast["algorithms_against_torch"].recommendation
    assert fast["algorithms_against_torch"].is_shown
    slow = _answers(_frame(lambda name, *rest: (2 if name == "chosen" else 1) * _textbook("torch", *rest)))
    assert "faster" not in slow["algorithms_against_torch"].recommendation
    assert "2.0" in slow["algorithms_against_torch"].recommendation


def test_a_ring_that_is_slower_everywhere_is_a_no():
    answer = _answers(_frame(lambda name, *rest: (2 if name == "ring" else 1) * 1e-3))["ring_against_torch"]
    assert answer.verdict == "no"
    assert "faster in 0" in answer.text


def test_wrong_results_are_shouted():
    frame = _frame()
    frame.loc[frame["algorithm"] == "butterfly", "gate"] = "wrong: error 1e+00, at most 1e-06 expected"
    assert "WRONG RESULTS, and therefore no times, from butterfly" in _answers(frame)["algorithms_against_torch"].text


def test_scheduling_that_helps_hurts_or_does_both():
    def scaled(factor_of_batch):
        return lambda name, p, n, policy: 1e-3 * (factor_of_batch(p) if policy == "batch" else 1)

    verdicts = {
        "yes": scaled(lambda p: 0.3),
        "no": scaled(lambda p: 3.0),
        "mixed": scaled(lambda p: 0.3 if p <= 4 else 3.0),
    }
    for verdict, seconds in verdicts.items():
        assert _answers(_frame(seconds, worlds=(2, 4, 6, 8)))["scheduling"].verdict == verdict


def _both_orders(seconds, *, drift):
    """The policies one after the other, then backwards, on a machine that gets slower by a factor each time."""
    orders = []
    for turn, policies in ((1, ("batch", "default")), (2, ("default", "batch"))):
        late = {policy: drift ** (2 * (turn - 1) + index) for index, policy in enumerate(policies)}
        frame = _frame(
            lambda *setting, late=late: seconds(*setting) * late[setting[-1]], worlds=(2, 4, 6, 8), seed=turn
        )
        orders.append(frame[frame["sweep"] == "scheduling"].assign(turn=turn))
    return pd.concat(orders, ignore_index=True)


def test_a_scheduling_policy_is_not_better_for_having_been_measured_before_the_other():
    alike = _both_orders(lambda *_: 1e-3, drift=1.2)
    assert _answers(alike[alike["turn"] == 1])["scheduling"].verdict == "yes"  # what one order would say
    assert _answers(alike)["scheduling"].verdict == "no difference shown"
    assert analysis.batch_against_default(alike)["ratio"].tolist() == pytest.approx([1.0] * 8, rel=0.03)
    better = _both_orders(lambda *setting: 1e-3 * (0.5 if setting[-1] == "batch" else 1), drift=1.2)
    assert _answers(better)["scheduling"].verdict == "yes"


def test_published_trends_hold_are_contradicted_or_not_shown():
    def published(name, p, n, _):
        return {"butterfly": 0.5, "torch": 1.0}.get(name, 2.0) * p * n

    held = _answers(_frame(published))["published_trends"]
    assert held.verdict == "yes", held.text
    reverse = _answers(_frame(lambda name, p, n, _: {"butterfly": 4, "torch": 3}.get(name, 1) * n**2 / p))
    assert reverse["published_trends"].verdict == "no", reverse["published_trends"].text
    assert ": contradicted here" in reverse["published_trends"].text
    noise = _answers(_frame(lambda name, p, n, _: 1e-9 * n, noise=0.1, seed=1))["published_trends"]
    assert "From 1 MB on, more ranks take longer (0 of 3 steps shown): not shown here" in noise.text
    few = _answers(_frame(published, repeats=3))["published_trends"]
    assert few.verdict == "not shown"


def test_a_range_of_sizes_ends_where_torch_wins():
    def gaps(name, p, n, _):
        return 1e-3 * (0.5 if name == "ring" and n in (KIB, 100 * MIB) else 2 if name not in ("torch", "chosen") else 1)

    text = _answers(_frame(gaps))["algorithms_against_torch"].text
    assert "gloo, 2 ranks: torch is beaten by ring at 1 KiB" in text
    assert "ring at 1 KiB (0.50 of torch's time) and at 100 MiB (0.50 of torch's time)." in text


def test_the_chooser_alone_is_judged_itself():
    frame = _frame(lambda name, *rest: 1e-3 * (0.5 if name == "chosen" else 1))
    answer = _answers(frame[frame["algorithm"].isin(["torch", "chosen"])])["algorithms_against_torch"]
    assert answer.verdict == "yes"
    assert "beaten by chosen from 1 KiB to 100 MiB" in answer.text


def test_fewer_repeats_at_one_end_claim_no_growth():
    frame = _frame(lambda name, p, n, _: 1e-3 * p)
    few = frame[(frame["world_size"] != 4) | (frame["repeat"] < 3)]
    assert "no longer than 2, as far as is shown" in _answers(few)["size_and_ranks"].text


def test_few_repeats_claim_nothing():
    answers = _answers(_frame(lambda name, *rest: (0.5 if name == "chosen" else 1) * 1e-3, repeats=3))
    assert answers["algorithms_against_torch"].verdict == "no difference shown"
    assert "too few repeats" in answers["size_and_ranks"].text


def test_the_question_ids_are_the_published_ones():
    assert [question.id for question in STUDY.questions] == [
        "size_and_ranks",
        "algorithms_against_torch",
        "ring_against_torch",
        "alpha_beta",
        "transports",
        "scheduling",
        "published_trends",
    ]


def test_shared_memory_is_recommended_where_it_is_faster_and_held_against_the_floor():
    answer = _answers(_frame(routes=ROUTES))["transports"]
    assert answer.verdict == "measured"
    assert "labkit's over shared memory 0.20" in answer.text
    assert "times the floor (additions and copies)" in answer.text
    assert "labkit's on registered tensors 1.50" in answer.text
    assert answer.headline.endswith("].")  # it holds all transports, and their intervals
    assert answer.is_shown
    assert "faster than torch's all-reduce in 10 of 10 settings" in answer.recommendation


def test_shared_memory_that_makes_no_difference_is_not_recommended():
    answer = _answers(_frame(routes=dict.fromkeys(ROUTES, 1.0), noise=0.2))["transports"]
    assert not answer.is_shown
    assert "no difference is shown" in answer.recommendation


def test_shared_memory_that_is_slower_is_said_to_be():
    answer = _answers(_frame(routes=ROUTES | {"shared": 1.5}))["transports"]
    assert not answer.is_shown
    assert "slower in 10 of 10" in answer.recommendation


def test_transports_without_shared_memory_give_the_reason():
    frame = _frame(routes={"torch": 1.0, "messages": 0.9, "floor": 0.1})
    refused = {"sweep": "transports", "algorithm": "chosen", "transport": "shared", "world_size": 2, "n_bytes": 1000}
    frame = pd.concat([frame, pd.DataFrame([refused | {"not_measured": "the ranks are on several hosts"}])])
    answer = _answers(frame)["transports"]
    assert "Not measured: shared (the ranks are on several hosts)." in answer.text
    assert answer.recommendation is None
    assert _answers(_frame(routes={}))["transports"].verdict == "not measured"


def _with_links(frame, models):
    """Pairs of ranks as a run across hosts has them: two rows a repeat, one a rank of the pair."""
    rows = []
    for link, model in models.items():
        for n_bytes in SIZES:
            base = {"sweep": "exchange", "algorithm": link, "world_size": 4, "n_bytes": n_bytes, "backend": "gloo"}
            base |= {"scheduling": "batch", "gate": "ok", "seconds": model.predict_s(MessageCost(1, n_bytes))}
            rows += [base | {"rank": rank, "repeat": repeat} for repeat in range(6) for rank in (0, 1)]
    return pd.concat([frame, pd.DataFrame(rows)], ignore_index=True)


def test_links_within_and_between_hosts_are_told_apart_and_leave_the_prediction_alone():
    models = {links.WITHIN: AlphaBeta(1e-4, 5e-10), links.BETWEEN: AlphaBeta(2e-3, 8e-9)}
    frame = _with_links(_frame(), models)
    for link, expected in models.items():
        found = analysis.link_models(frame)[link]["gloo", 4]
        assert found.alpha_s == pytest.approx(expected.alpha_s)
        assert found.beta_s_per_byte == pytest.approx(expected.beta_s_per_byte)
    assert analysis.exchange_models(frame) == analysis.exchange_models(_frame())
    (told,) = [a.text for a in STUDY.answers(frame, pd.DataFrame()) if a.question.id == "alpha_beta"]
    assert "gloo, 4 ranks, one pair between hosts: 2 ms a message and 125 MB/s each way." in told
    assert "gloo, 4 ranks, one pair within a host: 100 µs a message and 2 GB/s each way." in told


def test_on_one_host_there_are_no_links_to_tell_apart():
    assert analysis.link_models(_frame()) == {}
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
