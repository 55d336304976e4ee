"""Layouts, ranked."""

import numpy as np
import pytest

from labkit.scaling.hardware import find_hardware
from labkit.scaling.layout import why_impossible
from labkit.scaling.prediction import predict
from labkit.scaling.published import choices, load_published, nearest
from labkit.scaling.search import arrangement, rank, search
from tests.scaling.conftest import DATA, GPT_1B, LLAMA_8B, LLAMA_70B, run

H100 = find_hardware("h100")


@pytest.fixture(scope="module")
def published():
    return load_published(DATA)


@pytest.mark.parametrize(("model", "gpus"), [(GPT_1B, 1), (LLAMA_8B, 8), (LLAMA_70B, 64)])
def test_the_ranking_fits_is_possible_and_sorted(model, gpus):
    ranking = rank(model, H100, gpus, seq_len=4096, global_batch=128)
    found = [ranking.candidate(row) for row in ranking.order]
    assert all(why_impossible(one.layout, model, 4096) is None for one in found)
    assert all(one.layout.gpus == gpus and one.out_of_memory < 0.5 for one in found)
    best = found[0]
    assert best.step_s == pytest.approx(predict(model, H100, best.layout, seq_len=4096).step_s)
    assert best.step_s <= np.median([one.step_s for one in found])
    assert best.interval_90[0] <= best.step_s <= best.interval_90[1]


@pytest.mark.parametrize(("model", "gpus", "seq_len"), [(LLAMA_8B, 16, 8192), (LLAMA_70B, 64, 32768)])
def test_proposals_are_different_arrangements_and_the_best_of_each(model, gpus, seq_len):
    ranking = rank(model, H100, gpus, seq_len=seq_len, global_batch=128)
    proposed = search(model, H100, gpus, seq_len=seq_len, global_batch=128)
    assert [one.layout for one in proposed] == [one.layout for one in ranking.proposed()]
    assert proposed[0].layout == ranking.layouts[ranking.order[0]]
    assert len({arrangement(one.layout) for one in proposed}) == 3


def test_everything_that_is_asked_for_is_tried():
    layouts = rank(LLAMA_70B, H100, 64, seq_len=32768, global_batch=128).layouts
    assert {layout.cp for layout in layouts} == {1, 2, 4, 8}
    assert {layout.shard for layout in layouts} == {"none", "zero1", "zero2", "zero3", "hsdp"}
    assert {layout.recompute for layout in layouts} == {"none", "selective", "full"}
    assert {layout.vp for layout in layouts} == {1, 2, 4}
    assert not [layout for layout in layouts if layout.shard == "zero2" and layout.pp > 1]


def test_what_is_fixed_stays():
    fixed = {"tp": 2, "shard": "zero3", "micro_batch": 1, "recompute": "full"}
    for layout in rank(LLAMA_8B, H100, 16, seq_len=4096, global_batch=64, fixed=fixed).layouts:
        assert {name: getattr(layout, name) for name in fixed} == fixed


def test_what_does_not_fit_is_said_with_the_smallest_need():
    with pytest.raises(ValueError, match=r"no layout fits on 1 x H100-SXM-80GB: the smallest needs \d+ GiB"):
        search(LLAMA_70B, H100, 1, seq_len=4096, global_batch=8)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"gpus": 0}, "expected"),
        ({"gpus": 7, "global_batch": 8}, "no layout"),
        ({"fixed": {"tp": 3}}, "tp is 3, and 8 GPUs"),
        ({"fixed": {"tp": 2, "pp": 8}}, "tp x pp is 16"),
        ({"gpus": 64, "fixed": {"tp": 64}}, "32 heads cannot be divided"),
        ({"gpus": 64, "global_batch": 64, "fixed": {"pp": 64}}, "more than 32 layers"),
        ({"gpus": 64, "fixed": {"dp": 64}}, "cannot be divided over dp = 64"),
    ],
)
def test_impossible_requests(wrong, reason):
    asked = {"gpus": 8, "global_batch": 8} | wrong
    with pytest.raises(ValueError, match=reason):
        search(LLAMA_8B, H100, asked.pop("gpus"), seq_len=4096, **asked)


def test_more_gpus_are_faster():
    times = [search(LLAMA_8B, H100, gpus, seq_len=4096, global_batch=256)[0].step_s for gpus in (8, 16, 64)]
    assert times == sorted(times, reverse=True)


def test_zero2_reduces_the_gradients_of_every_micro_batch():
    slow = find_hardware("h100").linked(network_gbps=10)
    sharded, gradients = (
        predict(LLAMA_8B, slow, run(dp=32, global_batch=256, shard=shard).layout, seq_len=4096).parts_s
        for shard in ("zero1", "zero2")
    )
    assert gradients["data_parallel_s"] > 4 * sharded["data_parallel_s"]


def test_the_best_of_three_is_near_the_best_measured_and_never_runs_out_of_memory(published):
    found = list(choices(published))
    assert len(found) > 100
    assert not np.isinf([one for choice in found for one in choice.behind]).any()
    for group in {choice.group for choice in found}:
        own = [choice for choice in found if choice.group == group]
        behind = np.array([[choice.best_behind, choice.behind[0], choice.behind_simple] for choice in own])
        assert behind[:, 0].mean() < 0.05, group
        assert behind[:, 1].mean() < behind[:, 2].mean(), group


def test_the_nearest_published_rows_are_alike_and_carry_the_error_made_on_them(published):
    rows = nearest(published, run(LLAMA_8B, dp=8, shard="zero3", global_batch=64, framework="torchtitan"))
    assert rows[0].group == "torchtitan"
    assert all(row.step_s > 0 and np.isfinite(row.error) for row in rows)
    assert len({(row.group, row.model, row.gpus) for row in rows}) == len(rows) == 5
    unknown = nearest(published, run(LLAMA_8B, dp=8, shard="zero3", global_batch=64))
    assert {row.predicted_s for row in unknown} != {row.predicted_s for row in rows}
