"""Layouts, ranked."""

import numpy as np
import pytest

from labkit.scaling.hardware import find_hardware
from labkit.scaling.layout import why_impossible
from labkit.scaling.prediction import predict
from labkit.scaling.search import search
from tests.scaling.conftest import GPT_1B, LLAMA_8B, LLAMA_70B

H100 = find_hardware("h100")


@pytest.mark.parametrize(("model", "gpus"), [(GPT_1B, 1), (LLAMA_8B, 8), (LLAMA_70B, 64)])
def test_the_ranking_fits_is_possible_and_sorted(model, gpus):
    found = search(model, H100, gpus, seq_len=4096, global_batch=128)
    assert all(why_impossible(one.layout, model, 4096) is None for one in found)
    assert all(one.layout.gpus == gpus and one.out_of_memory < 0.5 for one in found)
    best = found[0]
    assert best.step_s == pytest.approx(predict(model, H100, best.layout, seq_len=4096).step_s)
    assert best.step_s <= np.median([one.step_s for one in found])
    assert best.interval_90[0] <= best.step_s <= best.interval_90[1]
    assert search(model, H100, gpus, seq_len=4096, global_batch=128, keep=3) == found[:3]


def test_what_does_not_fit_is_said_with_the_smallest_need():
    with pytest.raises(ValueError, match=r"no layout fits on 1 x H100-SXM-80GB: the smallest needs \d+ GiB"):
        search(LLAMA_70B, H100, 1, seq_len=4096, global_batch=8)


@pytest.mark.parametrize("wrong", [{"gpus": 0}, {"gpus": 7, "global_batch": 8}])
def test_impossible_requests(wrong):
    asked = {"gpus": 8, "global_batch": 8} | wrong
    with pytest.raises(ValueError, match=r"expected|no layout"):
        search(LLAMA_8B, H100, asked.pop("gpus"), seq_len=4096, **asked)


def test_more_gpus_are_faster():
    times = [search(LLAMA_8B, H100, gpus, seq_len=4096, global_batch=256, keep=1)[0].step_s for gpus in (8, 16, 64)]
    assert times == sorted(times, reverse=True)
