"""The CIFAR-100 lab's training: the weights of one process, one order for all, going on as if never stopped."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from labkit.nn.vision import SmallConvNet
from labkit.parallel.launch import Row, launch
from labkit.studies.cifar100.training import OWN_LOCAL, OWN_SYNC, TORCH_LOCAL, Recipe, add_to_sums, seed_of, updates_of
from tests.studies import cifar100_ranks as ranks

RECIPE = Recipe(classes=10, batch=4, accumulation=3)
# What one process passes through the net at a time: a micro-batch of both ranks, or that of one.
WHOLE, EACH = 2 * ranks.RECIPE.batch, ranks.RECIPE.batch


TRAINED = (OWN_SYNC, OWN_LOCAL, TORCH_LOCAL)
DEVIATIONS = [(OWN_SYNC, WHOLE), (OWN_LOCAL, EACH), (TORCH_LOCAL, EACH), (OWN_LOCAL, WHOLE)]
ON_RANKS = {
    ranks.deviations: DEVIATIONS,
    ranks.collectives_by_micro_batches: TRAINED,
    ranks.all_interrupted_and_not: TRAINED,
    ranks.all_validated: ([5, 5], [5, 4], [3, 0]),
}


@cache
def _all_told():
    """What each function told on each of two ranks, or why not. One group calls them all; a failure costs its own."""
    told = {function: [None, None] for function in ON_RANKS}
    for item in launch(ranks.call, ON_RANKS.items(), world_size=2):
        function = list(ON_RANKS)[item.index]
        if isinstance(item, Row):
            told[function][item.rank] = item.values["result"]
        elif item.status != "ok":
            told[function] = item.reason
    return told


def _told(function):
    told = _all_told()[function]
    assert isinstance(told, list), told
    return told


def _deviations():
    """By case, for each rank: (deviation from one process, change of the weights, deviation of running statistics)."""
    return {case: of_ranks for case, *of_ranks in zip(DEVIATIONS, *_told(ranks.deviations), strict=True)}


def test_two_ranks_train_to_the_weights_of_one_process_on_the_whole_batch():
    """8 updates of two micro-batches, float64, no dropout."""
    for deviation, change, of_statistics in _deviations()[OWN_SYNC, WHOLE]:
        assert change > 0.05
        assert deviation < 1e-9 * change
        assert of_statistics < 1e-10


@pytest.mark.parametrize("name", [OWN_LOCAL, TORCH_LOCAL])
def test_local_batch_norm_trains_as_one_process_that_takes_micro_batches_one_by_one(name):
    for deviation, change, _ in _deviations()[name, EACH]:
        assert deviation < 1e-9 * change


def test_the_comparison_can_fail():
    """Local batch norm is far from one process on the whole batch."""
    for deviation, change, _ in _deviations()[OWN_LOCAL, WHOLE]:
        assert deviation > 1e-3 * change


def test_ranks_synchronize_once_an_update_however_many_micro_batches():
    for rank in _told(ranks.collectives_by_micro_batches):
        for name in (OWN_LOCAL, TORCH_LOCAL):
            one, two, four = rank[name]
            assert one == two == four
            assert one.count("allreduce_") == 2  # the first bucket, and the rest of the gradients
        # batch norm gathers in each forward pass and adds up in each backward, one message each on two ranks
        counts = [(names.count("1 message"), names.count("allreduce_")) for names in rank[OWN_SYNC]]
        assert counts == [(2, 2), (4, 2), (8, 2)]


def test_a_training_that_goes_on_ends_bit_by_bit_as_one_in_one_go():
    first, second = _told(ranks.all_interrupted_and_not)
    for rank in (first, second):
        for name, (in_one_go, interrupted) in rank.items():
            assert in_one_go == interrupted, name
    for name in first:  # and ranks end alike
        assert first[name][0][0] == second[name][0][0]


def test_validation_over_shards_is_that_of_one_process():
    for rank in _told(ranks.all_validated):
        for found, expected in rank:
            assert found == pytest.approx(expected, rel=1e-12)


def test_each_epoch_has_an_order_of_its_own_and_every_image_at_most_once():
    first, again, second = (torch.cat(list(updates_of(50, RECIPE, 3, epoch, 2))) for epoch in (1, 1, 2))
    assert first.shape == (6, 2, 4)  # micro-batches, ranks, images; two images are left over
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    assert len(set(first.flatten().tolist())) == first.numel()
    assert [len(update) for update in updates_of(50, replace(RECIPE, accumulation=4), 3, 1, 2)] == [4, 2]


def test_a_batch_is_no_larger_than_what_there_is():
    (update,) = updates_of(7, RECIPE, 0, 1, 2)
    assert update.shape == (1, 2, 3)
    with pytest.raises(ValueError, match="expected at least two images per rank, got 3 for 2 ranks"):
        list(updates_of(3, RECIPE, 0, 1, 2))


def test_seeds_of_different_things_differ():
    seeds = [seed_of(seed, what, epoch) for seed in range(3) for what in ("order", "dropout") for epoch in range(3)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_the_net_is_the_published_one():
    net = SmallConvNet()
    assert sum(p.numel() for p in net.parameters()) == 825_988
    assert net.fc1.in_features == 6272
    assert net(torch.zeros(2, 3, 32, 32)).shape == (2, 100)


def test_validation_adds_up_on_the_device_of_the_model():
    """The meta device stands for a GPU: it too refuses a stack of its numbers and one in main memory."""
    for device in ("meta", "cpu"):
        sums = torch.zeros(3, dtype=torch.float64, device=device)
        logits, target = torch.eye(4, device=device), torch.tensor([0, 1, 2, 0], device=device)
        add_to_sums(sums, logits, target)
    assert sums[1:].tolist() == [3, 4]
    assert float(sums[0]) == pytest.approx(float(torch.nn.functional.cross_entropy(logits, target, reduction="sum")))
