"""A user's alternatives in every lab that takes them: a right one is timed, a wrong one is named
and costs no other."""

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn

from labkit.lab.runs.measure import measure
from labkit.lab.user_worker import Plugins
from labkit.parallel.data_parallel import NaiveDDP
from labkit.parallel.sync_batchnorm import SyncBatchNorm
from labkit.studies import load_lab
from tests.cases import thinned


def add_up(tensor):
    dist.all_reduce(tensor)


def average(tensor):
    dist.all_reduce(tensor)
    tensor /= dist.get_world_size()


def first_rank_only(tensor):
    dist.broadcast(tensor, 0)


def attend(q, k, v, causal):
    return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)


def attend_to_all(q, k, v, causal):
    return nn.functional.scaled_dot_product_attention(q, k, v)


def raise_error(*arguments):
    raise RuntimeError("no such thing")


class AllButOne(nn.Module):
    """A wrapper that leaves out the last gradient."""

    def __init__(self, model):
        super().__init__()
        self.module = model

    def forward(self, *inputs):
        return self.module(*inputs)

    def finish_gradient_synchronization(self):
        for parameter in list(self.module.parameters())[:-1]:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


class Own(torch.optim.Optimizer):
    """A sharded optimizer in a few lines; the subclass leaves the last parameter as it is on all
    ranks but one."""

    n_left_out = 0

    def __init__(self, params, optimizer_cls, **settings):
        super().__init__(params, settings)
        self.params = self.param_groups[0]["params"]
        mine = self.params[dist.get_rank() :: dist.get_world_size()]
        self.of_my_share = optimizer_cls(mine, **settings)

    def step(self):
        self.of_my_share.step()
        for index, parameter in enumerate(self.params[: len(self.params) - self.n_left_out]):
            dist.broadcast(parameter.data, src=index % dist.get_world_size())


class Forgetful(Own):
    n_left_out = 1


CASES = {
    "all_reduce": (
        {"world_sizes": [2], "sizes_bytes": [1024], "transports": [], "scheduling_bytes": []},
        {"right": add_up, "averages": average, "copies": first_rank_only, "raises": raise_error},
        "algorithm",
    ),
    "attention": (
        {"sequences": [64], "compiled_sequences": [], "dtypes": ["float32"]},
        {"right": attend, "looks_ahead": attend_to_all, "raises": raise_error},
        None,
    ),
    "data_parallel": (
        {"workloads": ["nano"], "world_sizes": [2], "batches": [1], "context_lengths": [8]},
        {"right": NaiveDDP, "leaves_out": AllButOne, "raises": raise_error},
        None,
    ),
    "sharding": (
        {
            "optimizers": ["SGD"],
            "transports": ["point_to_point"],
            "memory_world_sizes": [2],
            "context_length": 8,
        },
        {"right": Own, "forgets": Forgetful, "raises": raise_error},
        None,
    ),
    "sync_batchnorm": (
        {"world_sizes": [2], "batches": [8], "features": [4]},
        {"right": SyncBatchNorm, "is_local": nn.BatchNorm1d, "raises": raise_error},
        "alternative",
    ),
}


@pytest.mark.parametrize("lab", thinned(CASES, lambda lab: lab in ("attention", "sync_batchnorm")))
def test_a_right_alternative_is_timed_and_a_wrong_one_is_named(lab, tmp_path):
    changed, alternatives, column = CASES[lab]
    declared = load_lab(lab)
    few = {"repeats": 2, "warmup": 0, declared.plugin_parameter: ALONGSIDE[lab]}
    smoke = declared.profiles["smoke"].model_dump() | few
    config = declared.config.model_validate(
        smoke | {name: value for name, value in changed.items() if name in smoke}
    )
    run = measure(
        declared, config, profile="smoke", plugins=Plugins(alternatives), directory=tmp_path
    )
    frame = run.frame()
    rows = frame.groupby(column or "implementation", sort=False)
    verdicts = {name: set(group["status"].dropna()) for name, group in rows}
    timed = {name for name, group in rows if group["seconds"].notna().any()}
    assert {*ALONGSIDE[lab], "right"} <= timed
    assert verdicts["right"] == {"ok"}
    for name in set(alternatives) - {"right", "raises"}:
        assert verdicts[name] == {"wrong"}, name
        assert name not in timed
    assert verdicts["raises"] == {"failed"}
    reasons = set(frame.loc[frame["status"] == "failed", "reason"])
    assert all(
        re.search(r"no such thing, line \d+ of test_own_alternatives", one) for one in reasons
    )
    assert run.coverage()["status"].eq("ok").all()


ALONGSIDE = {
    "all_reduce": ["ring"],
    "attention": ["explicit"],
    "data_parallel": ["naive"],
    "sharding": ["ddp"],
    "sync_batchnorm": ["plain_local_batch"],
}
