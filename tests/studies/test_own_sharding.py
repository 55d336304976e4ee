"""A reader's own sharded optimizers, wrappers and models in the sharding lab: gated, timed, counted and named."""

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from labkit.costs.transformer import TransformerShape
from labkit.lab import figures
from labkit.lab.user_plugins import Plugins, known
from labkit.lab.runs.measure import measure
from labkit.nn.transformer import Transformer
from labkit.parallel.sharding import FSDP
from labkit.parallel.sharding.implementations import IMPLEMENTATIONS, held_tensors
from labkit.studies.sharding import predicting, tables
from labkit.studies.sharding.study import STUDY
from tests import calibrated
from tests.studies import tiny

OF_TINY = {"sizes": [tiny.NAME], "memory_sizes": [tiny.NAME], "swept_sizes": []}
SMOKE = STUDY.profiles["smoke"].model_copy(update={"ways": ["ddp", "zero1"]} | OF_TINY)
HERE = r"line \d+ of test_own_sharding.py"


class _DealtOut(torch.optim.Optimizer):
    """Whole parameters, one rank's after the other's; who has updated one broadcasts it."""

    def __init__(self, params, optimizer_cls, **settings):
        super().__init__(params, settings)
        self.params = self.param_groups[0]["params"]
        self.of_my_share = optimizer_cls(self.params[dist.get_rank() :: dist.get_world_size()], **settings)

    def step(self):
        self.of_my_share.step()
        self.send(self.params)

    def send(self, params):
        for index, parameter in enumerate(params):
            dist.broadcast(parameter.data, src=index % dist.get_world_size())


class _ForgetsTheLast(_DealtOut):
    def send(self, params):
        super().send(params[:-1])


class _Mistaken(_DealtOut):
    def send(self, params):
        raise KeyError("nothing of the kind")


def _ahead(model):
    return FSDP(model, prefetch=2)


def test_a_readers_own_sharded_optimizer_and_wrapper_are_gated_timed_counted_drawn_and_named(tmp_path):
    own = {
        "none": lambda model: None,  # those that fail come first: a point begins anew without them
        "mistaken": _Mistaken,
        "mine": _DealtOut,
        "forgets": _ForgetsTheLast,
        "ahead": _ahead,
    }
    run = measure(STUDY, SMOKE, profile="smoke", alternatives=own, models=tiny.MODELS, directory=tmp_path)
    assert not set(own) & set(IMPLEMENTATIONS)
    frame, coverage = run.frame(), run.coverage()
    for kind in ("time", "memory"):
        gates = frame[frame["kind"] == kind].dropna(subset="check").groupby("way")["check"].first()
        assert gates[["ddp", "zero1", "mine", "ahead"]].eq("ok").all()
        assert re.match(r"wrong: rank \d, output.weight, element \d+: expected \S+, got ", gates["forgets"])
        assert re.match(rf"failed: KeyError: .*{HERE}", gates["mistaken"])
        assert gates["none"] == "failed: ValueError: expected an nn.Module, got NoneType"
    times = tables.times(frame)
    assert set(times["way"]) == {"DDP", "ZeRO-1", "mine", "ahead"}
    plot = figures.bars(times[times["part"] == "optimizer"], x="way", x_order=tables.ORDER, y="seconds")
    assert {"mine", "ahead"} <= {label.get_text() for label in plot.figure.axes[0].get_xticklabels()}
    sent = tables.sent_per_step(frame).set_index("way")["times_parameters"]
    assert sent["mine"] == pytest.approx(2 + 1, rel=0.02)  # DDP's, and whole parameters from their owners
    assert sent["ahead"] == pytest.approx(sent["DDP"] * 1.5, rel=0.02)
    held = tables.made_of(frame, held=True).pivot_table(index="way", columns="part", values="bytes", observed=True)
    with torch.device("meta"):
        sizes = [parameter.numel() for parameter in Transformer(tiny.TINY, context_length=8).parameters()]
    most = max(sum(sizes[rank::2]) for rank in range(2))  # dealt out by parameter, not by element
    assert held.loc["mine", "optimizer state"] == pytest.approx(2 * 4 * most, rel=0.001)
    assert held.loc["ahead", "parameters"] < 0.6 * held.loc["DDP", "parameters"]
    found = STUDY.findings(frame, coverage)
    assert {"mine", "ahead"} <= {effect.subject for effect in found["time"].effects}
    assert {"mine", "ahead"} <= {effect.subject for effect in found["peaks"].effects}
    assert "mine" not in (found["time"].advice or "")
    assert all(name in found["time"].caveat for name in ("forgets", "mistaken"))


def test_gathers_of_the_turn_after_it_are_not_those_of_a_way_whose_messages_labkit_does_not_see(tmp_path):
    own = {"plain": nn.parallel.DistributedDataParallel}
    run = measure(STUDY, SMOKE, profile="smoke", alternatives=own, models=tiny.MODELS, directory=tmp_path)
    times = tables.timed(run.frame())
    assert set(times.loc[times["part"] == tables.STEP, "way"]) == {"DDP", "ZeRO-1", "plain"}
    assert set(times.loc[times["part"] == tables.WAITING, "way"]) == {"ZeRO-1"}


def _convolutions():
    """A bias before a norm has rounding for a gradient; one layer is frozen, dropout draws anew on each rank."""
    frozen = nn.Linear(32, 32)
    frozen.requires_grad_(False)
    body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2))
    model = nn.Sequential(body, nn.Linear(8 * 4, 32), frozen, nn.Linear(32, 4))
    return model, torch.randn(6, 3, 4, 4), torch.randint(4, (6,)), cross_entropy


def _wrong_shape():
    return nn.Linear(3, 2), torch.randn(4, 8), torch.randn(4, 2), mse_loss


def test_a_readers_own_models_are_gated_timed_weighed_and_named_and_a_mistake_costs_no_other(tmp_path):
    wide = TransformerShape(d_model=8, d_ff=16, n_layers=1, n_heads=2, vocabulary=50)
    own = {"mine": _convolutions, "wide": wide, "wrong_shape": _wrong_shape}
    given = {"ways": ["ddp", "zero1", "zero2", "zero3", "torch_zero3"], "sizes": ["wide"], "memory_sizes": ["wide"]}
    config = SMOKE.model_copy(update=given)
    run = measure(STUDY, config, profile="smoke", models=own, directory=tmp_path)
    coverage = run.coverage().query("device == 'cpu'")
    assert set(coverage.loc[coverage["size"] != "wrong_shape", "status"]) == {"ok"}
    wrong = coverage.loc[coverage["size"] == "wrong_shape", "reason"]
    assert len(wrong) == 2
    assert all(re.search(rf"shapes cannot be multiplied .*{HERE}", reason) for reason in wrong)
    frame = run.frame()
    assert set(frame["size"]) == {"mine", "wide"}
    assert set(frame["check"].dropna()) == {"ok"}
    assert set(tables.times(frame)["size"]) == {"mine", "wide"}
    panels = set(tables.in_panels(tables.times(frame))["panel"])
    assert any(panel.startswith("mine, ") for panel in panels)
    ratios = predicting.break_even(frame, calibrated.made_up()).set_index("size")["predicted_ratio"]
    assert ratios.notna().to_dict() == {"mine": False, "wide": True}
    assert {"mine", "wide"} <= set(tables.made_of(frame, held=True)["size"])
    found = STUDY.findings(frame, run.coverage())
    assert {"mine", "wide"} <= set(found["formula"].table["size"]) & set(found["bytes"].table["size"])
    assert found["formula"].verdict == found["bytes"].verdict == "yes"


def test_what_is_a_sharded_optimizer_is_known_by_its_arguments():
    def made(params, optimizer_cls, **settings):
        return optimizer_cls(params, **settings)

    own = {"a_class": _DealtOut, "a_function": made, "wrapper": _ahead, "module": FSDP, "of_c": print}
    with known(STUDY.register, Plugins(alternatives=own)):
        kinds = {name: IMPLEMENTATIONS[name].func.__name__ for name in own}
    assert kinds == {
        "a_class": "_own_optimizer",
        "a_function": "_own_optimizer",
        "wrapper": "_own_wrapper",
        "module": "_own_wrapper",
        "of_c": "_own_wrapper",
    }


def test_state_inside_of_an_optimizer_is_counted_wherever_it_is_kept():
    class Lists(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {})
            self.each = [torch.optim.AdamW([parameter]) for parameter in self.param_groups[0]["params"]]

    model = nn.Linear(3, 4)
    optimizer = Lists(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    for one in optimizer.each:
        one.step()
    held = held_tensors(model, optimizer)
    assert sum(value.numel() for value in held["optimizer"]) == 2 * 16 + 2  # and a counter of steps each
    assert len(held["gradients"]) == 2
