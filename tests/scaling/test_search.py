"""Layouts, ranked."""

import numpy as np
import pandas as pd
import pytest

from labkit.scaling.hardware import find_hardware
from labkit.scaling.prediction import predict
from labkit.scaling.runs import Run, impossible_reason
from labkit.scaling.scores import chosen_layouts
from labkit.scaling.search import Request, rank
from tests.scaling.conftest import GPT_1B, LLAMA_8B, LLAMA_70B

H100 = find_hardware("h100")


def request(model=LLAMA_8B, gpus=16, seq_len=4096, global_batch=128, **fixed):
    return Request(model, H100, gpus, seq_len, global_batch, fixed=fixed)


def tried(one):
    return [run.layout for run in rank(one).predictions.runs.origin]


@pytest.mark.parametrize(("model", "gpus"), [(GPT_1B, 1), (LLAMA_8B, 16), (LLAMA_70B, 64)])
def test_the_ranking_fits_is_possible_and_proposes_different_arrangements(model, gpus):
    ranking = rank(request(model, gpus))
    predictions = ranking.predictions.select(ranking.order)
    assert all(impossible_reason(one.layout, model, 4096) is None for one in predictions)
    assert all(one.layout.gpus == gpus and one.may_fit for one in predictions)
    best = ranking.first()
    proposed = ranking.proposed()
    assert best.step_s == pytest.approx(predict(Run(model, H100, best.layout, 4096)).step_s)
    assert best.step_s <= np.median([one.step_s for one in predictions])
    assert proposed[0].layout == best.layout
    assert len({one.layout.arrangement for one in proposed}) == len(proposed) == min(gpus, 3)


def test_every_kind_of_layout_is_tried():
    layouts = tried(request(LLAMA_70B, 64, seq_len=32768))
    assert {layout.cp for layout in layouts} == {1, 2, 4, 8}
    assert {layout.shard for layout in layouts} == {"none", "zero1", "zero2", "zero3", "hsdp"}
    assert {layout.recompute for layout in layouts} == {"none", "selective", "full"}
    assert {layout.vp for layout in layouts} == {1, 2, 4}
    assert not [layout for layout in layouts if layout.shard == "zero2" and layout.pp > 1]


@pytest.mark.parametrize("shard", ["zero1", "zero3"])
def test_fixed_fields_stay_and_nothing_is_sharded_over_one_rank(shard):
    fixed = {"shard": shard, "micro_batch": 1, "recompute": "full"}
    for layout in tried(request(**fixed)):
        assert {name: getattr(layout, name) for name in fixed} == fixed
        assert layout.dp * layout.cp > 1


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"gpus": 7, "global_batch": 8}, "8 sequences cannot be divided over dp = 7"),
        ({"tp": 3}, "8 GPUs cannot be divided over tp = 3; the nearest divisor is 2"),
        ({"tp": 2, "pp": 8}, "over tp x pp = 16; the nearest divisor is 8"),
        ({"gpus": 64, "tp": 64}, "32 heads cannot be divided"),
        ({"gpus": 64, "dp": 64}, "cannot be divided over dp = 64"),
        ({"dp": 1, "shard": "zero3"}, "no layout has gpus 8, dp 1, shard zero3 together"),
        ({"gpus": 1, "shard": "zero3"}, "no layout has gpus 1, shard zero3 together"),
    ],
)
def test_impossible_requests(wrong, reason):
    with pytest.raises(ValueError, match=reason):
        rank(request(**{"gpus": 8, "global_batch": 8} | wrong))


def test_the_best_of_three_is_near_the_best_measured_and_never_runs_out_of_memory():
    table = (
        chosen_layouts()
        .set_index("table")
        .loc[["nanotron", "vtrain_multinode", "vtrain_singlenode"]]
    )
    assert isinstance(table, pd.DataFrame)
    assert table["families"].sum() > 100
    assert (table["best_of_three"] < 5).all()
    assert (table["first"] < table["smallest_that_fits"]).all()
    assert (table["ran_out_of_memory"] == 0).all()
