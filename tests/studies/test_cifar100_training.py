"""The CIFAR-100 lab's training: weights of one process, one order for all, and a resume that
changes nothing."""

import hashlib
from dataclasses import replace
from functools import cache
from io import BytesIO

import pytest
import torch
import torch.distributed as dist

from labkit.nn.vision import SmallConvNet
from labkit.parallel.launch import Row, launch
from labkit.studies.cifar100.training import (
    OWN_LOCAL,
    OWN_SYNC,
    TORCH_LOCAL,
    Recipe,
    Trainer,
    add_to_sums,
    seed_of,
    updates_of,
)  # fmt: skip
from tests.parallel.sync_batchnorm_cases import collectives_of

ORDERED = Recipe(classes=10, batch=4, accumulation=3)
RECIPE = Recipe(
    classes=10, batch=4, accumulation=2, dropout=False, dtype=torch.float64, learning_rate=0.05
)


def call(point):
    """The worker: a function and its argument are a point."""
    function, argument = point
    yield {"result": function(argument)}


def random_images(number, seed=0):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (number, 3, 32, 32), generator=generator, dtype=torch.uint8)
    return images, torch.randint(0, 10, (number,), generator=generator)


def weights(net):
    return torch.cat([parameter.detach().flatten() for parameter in net.parameters()])


def first_updates(number, images):
    """(micro-batches, ranks, images) of the first so many updates of the recipe's epochs."""
    updates = []
    epoch = 0
    while len(updates) < number:
        epoch += 1
        updates += updates_of(images, RECIPE, 0, epoch, dist.get_world_size())
    return updates[:number]


def one_process(net, images, labels, updates, batch):
    """Plain PyTorch: each update is one step down the mean loss of its images, which pass the net
    `batch` at a time."""
    optimizer = torch.optim.SGD(net.parameters(), lr=RECIPE.learning_rate, momentum=RECIPE.momentum)
    for update in updates:
        everybody = update.flatten()
        parts = ((images[everybody].double() - 127.5) / 127.5).split(batch)
        logits = torch.cat([net(part) for part in parts])
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(logits, labels[everybody]).backward()
        optimizer.step()


def deviation_from_one_process(case):
    """After 3 updates: how far weights are from one process's, how far they went, how far
    statistics are."""
    name, batch = case
    images, labels = random_images(40)
    updates = first_updates(3, len(images))
    trainer = Trainer(name, RECIPE, 0)
    alone = SmallConvNet(RECIPE.classes, dropout=(0.0, 0.0)).double()
    alone.load_state_dict(trainer.net.state_dict())
    start = weights(alone)
    for update in updates:
        mine = update[:, dist.get_rank()].flatten()
        trainer.update(images[mine], labels[mine])
    one_process(alone, images, labels, updates, batch)
    statistics = {key: value for key, value in trainer.net.state_dict().items() if "running" in key}
    expected = alone.state_dict()
    of_statistics = max(
        float((value - expected[key]).abs().max()) for key, value in statistics.items()
    )
    deviation, change = (
        float((weights(alone) - other).abs().max()) for other in (weights(trainer.net), start)
    )
    return deviation, change, of_statistics


def collectives_by_micro_batches(names):
    """Of one update, by implementation, with one, two and four micro-batches."""
    images, labels = random_images(16)
    counts = {}
    for name in names:
        trainer = Trainer(name, RECIPE, 0)
        trainer.update(images[:8], labels[:8])  # what is done once
        trainer.update(images[:8], labels[:8])
        counts[name] = [
            sorted(collectives_of(lambda n=n, t=trainer: t.update(images[:n], labels[:n]))[1])
            for n in (4, 8, 16)
        ]
    return counts


def digest(trainer):
    """Of everything the next epoch depends on, bit by bit."""
    state = trainer.state()
    tensors = [
        *state["net"].values(),
        *(slot["momentum_buffer"] for slot in state["optimizer"]["state"].values()),
    ]
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()


def interrupted_and_not(name):
    """Digests after two epochs with dropout: in one go, and by a new trainer from the state after
    the first one."""
    recipe = replace(RECIPE, dropout=True, dtype=torch.float32)
    data = random_images(16)
    shard = random_images(6, seed=1 + dist.get_rank())
    digests = []
    for stops_after in (2, 1):
        trainer = Trainer(name, recipe, 7)
        losses = []
        for epoch in (1, 2):
            if epoch == stops_after + 1:
                file = BytesIO()
                torch.save(trainer.state(), file)
                torch.manual_seed(epoch)  # whatever happened in between
                trainer = Trainer(name, recipe, 7)
                trainer.load(torch.load(BytesIO(file.getvalue()), weights_only=True))
            total, seen = trainer.epoch(*data, 7, epoch)
            losses.append(
                [float(total), seen, *trainer.validate(*shard, 6 * dist.get_world_size())]
            )
        digests.append([digest(trainer), losses])
    return digests


def validated(sizes):
    """(loss, accuracy) over shards of these sizes, and those of one process over all of them."""
    images, labels = random_images(sum(sizes), seed=3)
    trainer = Trainer("own + SyncBatchNorm", RECIPE, 0)
    trainer.epoch(*random_images(16), 0, 1)
    rank = dist.get_rank()
    own = [part.split(sizes)[rank] for part in (images, labels)]
    result = trainer.validate(*own, sum(sizes))
    trainer.net.eval()
    with torch.no_grad():
        logits = trainer.net((images.double() - 127.5) / 127.5)
    loss = torch.nn.functional.cross_entropy(logits, labels)
    return list(result), [float(loss), float((logits.argmax(1) == labels).double().mean())]


TRAINED = (OWN_SYNC, OWN_LOCAL, TORCH_LOCAL)
# Images that one process passes through the net at a time: a micro-batch of both ranks, or that of
# one.
WHOLE = 2 * RECIPE.batch
EACH = RECIPE.batch
DEVIATIONS = [(OWN_SYNC, WHOLE), (OWN_LOCAL, EACH), (TORCH_LOCAL, EACH)]
POINTS = [
    *((deviation_from_one_process, case) for case in DEVIATIONS),
    (collectives_by_micro_batches, TRAINED),
    *((interrupted_and_not, name) for name in TRAINED),
    *((validated, sizes) for sizes in ([5, 5], [5, 4], [3, 0])),
]


@cache
def _results():
    """By point, the result of each of two ranks, or why there is none. One group runs all."""
    results = [[None, None] for _ in POINTS]
    for item in launch(call, POINTS, world_size=2):
        if isinstance(item, Row):
            results[item.index][item.rank] = item.values["result"]
        elif item.status != "ok":
            results[item.index] = item.reason
    return results


def _result(function, argument):
    result = _results()[POINTS.index((function, argument))]
    assert isinstance(result, list), result
    return result


def test_two_ranks_train_to_the_weights_of_one_process_on_the_whole_batch():
    """3 updates of two micro-batches, float64, no dropout."""
    for deviation, change, of_statistics in _result(deviation_from_one_process, (OWN_SYNC, WHOLE)):
        assert change > 0.02
        assert deviation < 1e-9 * change
        assert of_statistics < 1e-10


@pytest.mark.parametrize("name", [OWN_LOCAL, TORCH_LOCAL])
def test_local_batch_norm_trains_as_one_process_that_takes_micro_batches_one_by_one(name):
    for deviation, change, _ in _result(deviation_from_one_process, (name, EACH)):
        assert deviation < 1e-9 * change


def test_ranks_synchronize_once_an_update_however_many_micro_batches():
    for rank in _result(collectives_by_micro_batches, TRAINED):
        for name in (OWN_LOCAL, TORCH_LOCAL):
            one, two, four = rank[name]
            assert one == two == four
            assert one.count("allreduce_") == 2  # the first bucket, and the rest of the gradients
        # batch norm gathers in each forward pass and adds up in each backward, one message each on
        # two ranks
        counts = [(names.count("1 message"), names.count("allreduce_")) for names in rank[OWN_SYNC]]
        assert counts == [(2, 2), (4, 2), (8, 2)]


@pytest.mark.parametrize("name", TRAINED)
def test_a_resumed_training_ends_bit_by_bit_as_an_uninterrupted_one(name):
    first, second = _result(interrupted_and_not, name)
    for in_one_go, interrupted in (first, second):
        assert in_one_go == interrupted
    assert first[0][0] == second[0][0]  # and ranks end alike


@pytest.mark.parametrize("sizes", [[5, 5], [5, 4], [3, 0]])
def test_validation_over_shards_is_that_of_one_process(sizes):
    for result, expected in _result(validated, sizes):
        assert result == pytest.approx(expected, rel=1e-12)


def test_each_epoch_has_an_order_of_its_own_and_every_image_at_most_once():
    first, again, second = (
        torch.cat(list(updates_of(50, ORDERED, 3, epoch, 2))) for epoch in (1, 1, 2)
    )
    assert first.shape == (6, 2, 4)  # micro-batches, ranks, images; two images are left over
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    assert len(set(first.flatten().tolist())) == first.numel()
    assert [
        len(update) for update in updates_of(50, replace(ORDERED, accumulation=4), 3, 1, 2)
    ] == [4, 2]


def test_a_batch_is_no_larger_than_what_there_is():
    (update,) = updates_of(7, ORDERED, 0, 1, 2)
    assert update.shape == (1, 2, 3)
    with pytest.raises(
        ValueError, match="expected at least two images per rank, got 3 for 2 ranks"
    ):
        list(updates_of(3, ORDERED, 0, 1, 2))


def test_seeds_of_different_things_differ():
    seeds = [
        seed_of(seed, what, epoch)
        for seed in range(3)
        for what in ("order", "dropout")
        for epoch in range(3)
    ]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_the_net_is_the_published_one():
    net = SmallConvNet()
    assert sum(p.numel() for p in net.parameters()) == 825_988
    assert net.fc1.in_features == 6272
    assert net(torch.zeros(2, 3, 32, 32)).shape == (2, 100)


def test_validation_adds_up_on_the_device_of_the_model():
    """The meta device stands for a GPU: it too refuses a stack of its numbers and one in main
    memory."""
    for device in ("meta", "cpu"):
        sums = torch.zeros(3, dtype=torch.float64, device=device)
        logits = torch.eye(4, device=device)
        target = torch.tensor([0, 1, 2, 0], device=device)
        add_to_sums(sums, logits, target)
    assert sums[1:].tolist() == [3, 4]
    assert float(sums[0]) == pytest.approx(
        float(torch.nn.functional.cross_entropy(logits, target, reduction="sum"))
    )
