"""Layouts, ranked."""

import numpy as np
import pytest

from labkit.scaling.choices import choices
from labkit.scaling.hardware import find_hardware
from labkit.scaling.layout import impossible_reason
from labkit.scaling.prediction import predict
from labkit.scaling.search import arrangement, rank
from tests.scaling.conftest import GPT_1B, LLAMA_8B, LLAMA_70B

H100 = find_hardware("h100")


@pytest.mark.parametrize(("model", "gpus"), [(GPT_1B, 1), (LLAMA_8B, 16), (LLAMA_70B, 64)])
def test_the_ranking_fits_is_possible_and_proposes_different_arrangements(model, gpus):
    ranking = rank(model, H100, gpus, seq_len=4096, global_batch=128)
    found = [ranking.candidate(row) for row in ranking.order]
    assert all(impossible_reason(one.layout, model, 4096) is None for one in found)
    assert all(one.layout.gpus == gpus and one.out_of_memory < 0.5 for one in found)
    best = found[0]
    assert best.step_s == pytest.approx(predict(model, H100, best.layout, seq_len=4096).step_s)
    assert best.step_s <= np.median([one.step_s for one in found])
    proposed = ranking.proposed()
    assert proposed[0].layout == best.layout
    assert len({arrangement(one.layout) for one in proposed}) == len(proposed) == min(gpus, 3)


def test_every_kind_of_layout_is_tried():
    layouts = rank(LLAMA_70B, H100, 64, seq_len=32768, global_batch=128).layouts
    assert {layout.cp for layout in layouts} == {1, 2, 4, 8}
    assert {layout.shard for layout in layouts} == {"none", "zero1", "zero2", "zero3", "hsdp"}
    assert {layout.recompute for layout in layouts} == {"none", "selective", "full"}
    assert {layout.vp for layout in layouts} == {1, 2, 4}
    assert not [layout for layout in layouts if layout.shard == "zero2" and layout.pp > 1]


@pytest.mark.parametrize("shard", ["zero1", "zero3"])
def test_fixed_fields_stay_and_nothing_is_sharded_over_one_rank(shard):
    fixed = {"shard": shard, "micro_batch": 1, "recompute": "full"}
    for layout in rank(LLAMA_8B, H100, 16, seq_len=4096, global_batch=64, fixed=fixed).layouts:
        assert {name: getattr(layout, name) for name in fixed} == fixed
        assert layout.dp * layout.cp > 1


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
    request = {"gpus": 8, "global_batch": 8} | wrong
    with pytest.raises(ValueError, match=reason):
        rank(LLAMA_8B, H100, request.pop("gpus"), seq_len=4096, **request)


def test_more_gpus_are_faster():
    rankings = [rank(LLAMA_8B, H100, gpus, seq_len=4096, global_batch=256) for gpus in (8, 16, 64)]
    times = [ranking.proposed()[0].step_s for ranking in rankings]
    assert times == sorted(times, reverse=True)


def test_the_best_of_three_is_near_the_best_measured_and_never_runs_out_of_memory():
    found = [choice for choice in choices() if choice.group in ("nanotron", "vtrain_multinode", "vtrain_singlenode")]
    assert len(found) > 100
    assert not np.isinf([one for choice in found for one in choice.behind]).any()
    for group in {choice.group for choice in found}:
        rows = [choice for choice in found if choice.group == group]
        behind = np.array([[choice.best_behind, choice.behind[0], choice.behind_simple] for choice in rows])
        assert behind[:, 0].mean() < 0.05, group
        assert behind[:, 1].mean() < behind[:, 2].mean(), group
