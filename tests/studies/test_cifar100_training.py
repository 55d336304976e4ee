"""The CIFAR-100 lab's training: weights of one process, one order for all, and a resume that
changes nothing."""

import hashlib
from dataclasses import replace
from io import BytesIO

import pytest
import torch
import torch.distributed as dist

from labkit.nn.vision import SmallConvNet
from labkit.parallel.messages import gather_json
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
from tests.parallel.shared_ranks import on_ranks
from tests.parallel.sync_batchnorm_cases import collectives_of

ORDERED = Recipe(classes=10, batch=4, accumulation=3)
RECIPE = Recipe(
    classes=10, batch=4, accumulation=2, dropout=False, dtype=torch.float64, learning_rate=0.05
)


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


def deviation_from_one_process(name, batch):
    """After 3 updates: how far weights are from one process's, how far they went, how far
    statistics are."""
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


def collectives_by_micro_batches(name):
    """Of one update, with one, two and four micro-batches."""
    images, labels = random_images(16)
    trainer = Trainer(name, RECIPE, 0)
    trainer.update(images[:8], labels[:8])  # what is done once
    trainer.update(images[:8], labels[:8])
    return [
        collectives_of(lambda n=n: trainer.update(images[:n], labels[:n]))[1] for n in (4, 8, 16)
    ]


def digest(trainer):
    """Of everything the next epoch depends on, bit by bit."""
    state = trainer.state()
    tensors = [
        *state["net"].values(),
        *(slot["momentum_buffer"] for slot in state["optimizer"]["state"].values()),
    ]
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()


# Images that one process passes through the net at a time: a micro-batch of both ranks, or that of
# one.
WHOLE = 2 * RECIPE.batch
EACH = RECIPE.batch


@on_ranks(2)
def test_two_ranks_train_to_the_weights_of_one_process_on_the_whole_batch():
    """3 updates of two micro-batches, float64, no dropout."""
    deviation, change, of_statistics = deviation_from_one_process(OWN_SYNC, WHOLE)
    assert change > 0.02
    assert deviation < 1e-9 * change
    assert of_statistics < 1e-10


@on_ranks(2)
@pytest.mark.parametrize("name", [OWN_LOCAL, TORCH_LOCAL])
def test_local_batch_norm_trains_as_one_process_that_takes_micro_batches_one_by_one(name):
    deviation, change, _ = deviation_from_one_process(name, EACH)
    assert deviation < 1e-9 * change


@on_ranks(2)
def test_ranks_synchronize_once_an_update_however_many_micro_batches():
    for name in (OWN_LOCAL, TORCH_LOCAL):
        one, two, four = map(sorted, collectives_by_micro_batches(name))
        assert one == two == four
        assert one.count("allreduce_") == 2  # the first bucket, and the rest of the gradients
    # batch norm gathers in each forward pass and adds up in each backward, one message each on two
    # ranks
    names = collectives_by_micro_batches(OWN_SYNC)
    counts = [(each.count("1 message"), each.count("allreduce_")) for each in names]
    assert counts == [(2, 2), (4, 2), (8, 2)]


@on_ranks(2)
@pytest.mark.parametrize("name", [OWN_SYNC, OWN_LOCAL, TORCH_LOCAL])
def test_a_resumed_training_ends_bit_by_bit_as_an_uninterrupted_one(name):
    """Two epochs with dropout: in one go, and by a new trainer from the state after the first."""
    recipe = replace(RECIPE, dropout=True, dtype=torch.float32)
    data = random_images(16)
    shard = random_images(6, seed=1 + dist.get_rank())
    ends = []
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
            validated = trainer.validate(*shard, 6 * dist.get_world_size())
            losses.append([float(total), seen, *validated])
        ends.append([digest(trainer), losses])
    assert ends[0] == ends[1]
    assert gather_json(ends[0][0]) == [ends[0][0]] * 2, "ranks end differently"


@on_ranks(2)
@pytest.mark.parametrize("sizes", [[5, 5], [5, 4], [3, 0]])
def test_validation_over_shards_is_that_of_one_process(sizes):
    images, labels = random_images(sum(sizes), seed=3)
    trainer = Trainer("own + SyncBatchNorm", RECIPE, 0)
    trainer.epoch(*random_images(16), 0, 1)
    own = [part.split(sizes)[dist.get_rank()] for part in (images, labels)]
    loss, accuracy = trainer.validate(*own, sum(sizes))
    trainer.net.eval()
    with torch.no_grad():
        logits = trainer.net((images.double() - 127.5) / 127.5)
    expected = torch.nn.functional.cross_entropy(logits, labels)
    assert loss == pytest.approx(float(expected), rel=1e-12)
    assert accuracy == float((logits.argmax(1) == labels).double().mean())


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
