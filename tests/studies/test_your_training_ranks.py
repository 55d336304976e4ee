"""Your training on several ranks: strategies against one process, late ranks, shares of batches."""

from functools import partial
from pathlib import Path

import pandas as pd
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from labkit.lab.metric import Results
from labkit.lab.point import TimedPoint
from labkit.parallel import data_parallel
from labkit.parallel.data_parallel import LOCAL
from labkit.studies.shared import alternatives
from labkit.studies.your_training.rank_tables import lateness, scaling
from labkit.studies.your_training.ranks import STRATEGIES, measure_ranks, share_batches
from labkit.studies.your_training.setup import SetupError, Training, build, load_setup
from tests.cases import thinned
from tests.parallel.shared_ranks import on_ranks

FOLDER = Path(__file__).parent / "setups"
POINT = TimedPoint(warmup=0, repeats=1)


def rows_on_ranks(function):
    return list(measure_ranks(POINT, partial(build, function)))


@on_ranks(2, slow=[3])
@pytest.mark.parametrize(
    "name",
    # `test_stages_of_zero_hold_shares` trains gpt.
    thinned(["gpt", "images", "dropout", "tied_and_frozen"], lambda name: name != "gpt"),
)
def test_strategies_train_a_setup_as_one_process_does(name):
    rows = rows_on_ranks(load_setup(f"{FOLDER / name}.py"))
    statuses = {row["strategy"]: row["status"] for row in rows}
    # torch's FSDP has tied parameters in one unit only.
    failing = {"torch_zero3"} if name == "tied_and_frozen" else set()
    assert {one for one, status in statuses.items() if status != "ok"} - {
        "bucketed_shared"
    } == failing
    assert set(statuses) == set(STRATEGIES)


@on_ranks(3)
def test_stages_of_zero_hold_shares():
    rows = rows_on_ranks(load_setup(f"{FOLDER / 'gpt'}.py"))
    assert {row["strategy"] for row in rows if row["status"] == "ok"} >= {*STRATEGIES} - {
        "bucketed_shared"
    }
    held = {row["strategy"]: row for row in rows if "parameters_bytes" in row}
    whole = held["torch"]
    assert held["zero3"]["parameters_bytes"] < 0.4 * whole["parameters_bytes"]
    # All parameters for the model, and a third for the optimizer.
    assert 1.3 <= held["zero2"]["parameters_bytes"] / whole["parameters_bytes"] < 1.4
    for name in ("zero1", "zero2", "zero3"):
        assert held[name]["optimizer_bytes"] < 0.4 * whole["optimizer_bytes"]


@on_ranks(2)
def test_parameters_without_a_gradient_are_no_obstacle_to_wrappers():
    rows = rows_on_ranks(load_setup(f"{FOLDER / 'experts'}.py"))
    failing = {row["strategy"]: row["reason"] for row in rows if row["status"] == "failed"}
    assert {*failing} == {"zero1", "torch_zero1"}
    assert "experts.2.weight" in failing["zero1"]


def sensitive(steepness=300):
    """A training whose second gradient shows how the first step was rounded."""
    model = nn.Linear(64, 4, bias=False)
    loss = lambda model, x: (steepness * model(x)).sin().mean() / steepness  # noqa: E731
    batches = [torch.randn(4, 64) for _ in range(3)]
    return model, batches, loss, torch.optim.SGD(model.parameters(), lr=1.0)


@on_ranks(3)
def test_strategies_may_differ_as_much_as_rounding_makes_one_process_differ():
    rows = rows_on_ranks(sensitive)
    assert {row["status"] for row in rows if "error" in row} == {"ok"}
    assert max(row["error"] for row in rows if "error" in row) > 0


@on_ranks(3)
def test_what_rounding_would_hide_is_not_checked():
    rows = rows_on_ranks(lambda: sensitive(1e4))
    assert {row["status"] for row in rows if row["strategy"] != "local"} == {"refused"}


class Local(nn.Module):
    """A wrapper that averages nothing."""

    def __init__(self, module, **options):
        super().__init__()
        self.module = module

    def forward(self, *arguments):
        return self.module(*arguments)


def one_batch():
    model = nn.Linear(8, 8)
    return model, [torch.ones(4, 8)], lambda model, batch: model(batch).square().mean()


@on_ranks(2)
@pytest.mark.parametrize("setup", [one_batch, sensitive])
def test_a_wrapper_that_leaves_ranks_out_is_wrong_though_their_batches_are_equal(setup):
    right = data_parallel.IMPLEMENTATIONS["naive"]
    data_parallel.IMPLEMENTATIONS["naive"] = (Local, {})
    try:
        rows = rows_on_ranks(setup)
    finally:
        data_parallel.IMPLEMENTATIONS["naive"] = right
    wrong = [row for row in rows if row["strategy"] == "naive"]
    assert [row["status"] for row in wrong] == ["wrong"]


def with_workers():
    loader = DataLoader(list(torch.randn(8, 8)), batch_size=2, num_workers=1)
    model, _, loss = one_batch()
    return model, loader, loss


@on_ranks(2)
def test_a_turn_has_a_step_for_each_batch_that_workers_prepare():
    turns = []

    def time_none(alternatives, **_):
        turns.extend(alternatives.values())
        return {name: {part: [1.0] for part in parts} for name, parts in alternatives.items()}

    clock = alternatives.time_parts_interleaved
    alternatives.time_parts_interleaved = time_none
    try:
        rows = rows_on_ranks(with_workers)
    finally:
        alternatives.time_parts_interleaved = clock
    assert turns
    for parts in turns:
        assert [part.endswith("input") for part in parts].count(True) == 2
    local = [row for row in rows if row["strategy"] == LOCAL]
    assert sum(row["seconds"][0] for row in local if row["part"] == "input") == 1.0


def fails_on_rank_1():
    if torch.distributed.get_rank() == 1:
        raise RuntimeError("no such disk")
    return one_batch()


@on_ranks(2)
def test_a_setup_that_one_rank_cannot_make_is_refused_on_all():
    with pytest.raises(SetupError, match="no such disk"):
        rows_on_ranks(fails_on_rank_1)


def test_ranks_share_the_batches_of_a_loader_and_none_twice():
    def numbers(rank):
        loader = DataLoader(range(20), batch_size=2, shuffle=True)
        torch.manual_seed(1)
        training = Training(nn.Linear(1, 1), loader, max, None)
        return [int(one) for batch in share_batches(training, rank, 3).batches for one in batch]

    shares = [numbers(rank) for rank in range(3)]
    assert [len(share) for share in shares] == [6, 6, 6]
    assert len({number for share in shares for number in share}) == 18


def test_batches_without_an_end_are_not_drawn_at_once():
    def draw():
        for number in range(1000):
            yield [number % 2]
        raise RuntimeError("drawn to the end")

    loader = DataLoader(range(2), batch_sampler=draw())
    training = Training(nn.Linear(1, 1), loader, max, None)
    assert share_batches(training, 0, 2).batches is loader


def made_up(seconds):
    """Rows of one part per strategy, rank and repeat; seconds by strategy and rank."""
    return pd.DataFrame(
        {
            "kind": "rank part",
            "part": "forward",
            "world_size": 2,
            "point": "a",
            "strategy": strategy,
            "rank": rank,
            "repeat": repeat,
            "seconds": value + 0.001 * (repeat % 3),
            **dict.fromkeys(["parameters_bytes", "gradients_bytes", "optimizer_bytes"], 4.0),
        }
        for (strategy, rank), value in seconds.items()
        for repeat in range(10)
    )


def test_what_a_step_takes_longer_than_without_communication_is_exposed():
    seconds = {(LOCAL, 0): 0.10, (LOCAL, 1): 0.10, ("torch", 0): 0.15, ("torch", 1): 0.16}
    alone = pd.DataFrame({"kind": ["part"], "part": ["step"], "seconds": [0.2]})
    frame = pd.concat([made_up(seconds), alone])
    (row,) = scaling(Results(frame)).to_dict("records")
    assert row["exposed_s"] == pytest.approx(0.06)
    assert row["times_one_process"] == pytest.approx(2 * 0.2 / 0.161, rel=0.01)
    assert row["held_bytes"] == 12


@pytest.mark.parametrize(("later_s", "is_late"), [(0.2, True), (0.0, False)])
def test_a_late_rank_is_named_and_no_other(later_s, is_late):
    table = lateness(Results(made_up({(LOCAL, 0): 0.05, (LOCAL, 1): 0.05 + later_s})))
    assert list(table["is_late"]) == [False, is_late]
    assert table["later_s"].iloc[1] == pytest.approx(later_s, abs=1e-6)
