"""What ranks do in the tests of the CIFAR-100 lab's training."""

import hashlib
from dataclasses import replace
from io import BytesIO

import torch
import torch.distributed as dist

from labkit.nn.vision import SmallConvNet
from labkit.studies.cifar100.training import Recipe, Trainer, updates_of
from tests.parallel.sync_batchnorm_cases import collectives_of

RECIPE = Recipe(classes=10, batch=4, accumulation=2, dropout=False, dtype=torch.float64, learning_rate=0.05)


def call(point):
    """The worker: a function here and its argument are a point."""
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
    updates, epoch = [], 0
    while len(updates) < number:
        epoch += 1
        updates += updates_of(images, RECIPE, 0, epoch, dist.get_world_size())
    return updates[:number]


def one_process(net, images, labels, updates, batch):
    """Plain PyTorch: each update is one step down the mean loss of its images, which pass the net `batch` at a time."""
    optimizer = torch.optim.SGD(net.parameters(), lr=RECIPE.learning_rate, momentum=RECIPE.momentum)
    for update in updates:
        everybody = update.flatten()
        parts = ((images[everybody].double() - 127.5) / 127.5).split(batch)
        logits = torch.cat([net(part) for part in parts])
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(logits, labels[everybody]).backward()
        optimizer.step()


def deviation_from_one_process(name, batch):
    """After 8 updates: how far weights are from one process's, how far they went, how far statistics are."""
    images, labels = random_images(60)
    updates = first_updates(8, len(images))
    trainer, alone = Trainer(name, RECIPE, 0), SmallConvNet(RECIPE.classes, dropout=(0.0, 0.0)).double()
    alone.load_state_dict(trainer.net.state_dict())
    start = weights(alone)
    for update in updates:
        mine = update[:, dist.get_rank()].flatten()
        trainer.update(images[mine], labels[mine])
    one_process(alone, images, labels, updates, batch)
    statistics = {key: value for key, value in trainer.net.state_dict().items() if "running" in key}
    expected = alone.state_dict()
    of_statistics = max(float((value - expected[key]).abs().max()) for key, value in statistics.items())
    deviation, change = (float((weights(alone) - other).abs().max()) for other in (weights(trainer.net), start))
    return deviation, change, of_statistics


def deviations(cases):
    return [deviation_from_one_process(*case) for case in cases]


def collectives_by_micro_batches(names):
    """Of one update, by implementation, with one, two and four micro-batches."""
    images, labels = random_images(16)
    found = {}
    for name in names:
        trainer = Trainer(name, RECIPE, 0)
        trainer.update(images[:8], labels[:8])  # what is done once
        trainer.update(images[:8], labels[:8])
        found[name] = [
            sorted(collectives_of(lambda n=n, t=trainer: t.update(images[:n], labels[:n]))[1]) for n in (4, 8, 16)
        ]
    return found


def digest(trainer):
    """Of everything the next epoch depends on, bit by bit."""
    state = trainer.state()
    tensors = [*state["net"].values(), *(slot["momentum_buffer"] for slot in state["optimizer"]["state"].values())]
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()


def all_interrupted_and_not(names):
    return {name: interrupted_and_not(name) for name in names}


def interrupted_and_not(name):
    """Digests after three epochs with dropout: in one go, and by a new trainer from the state after the first one."""
    recipe = replace(RECIPE, dropout=True, dtype=torch.float32)
    data, shard = random_images(24), random_images(6, seed=1 + dist.get_rank())
    digests = []
    for stops_after in (3, 1):
        trainer, losses = Trainer(name, recipe, 7), []
        for epoch in (1, 2, 3):
            if epoch == stops_after + 1:
                file = BytesIO()
                torch.save(trainer.state(), file)
                torch.manual_seed(epoch)  # whatever happened in between
                trainer = Trainer(name, recipe, 7)
                trainer.load(torch.load(BytesIO(file.getvalue()), weights_only=True))
            total, seen = trainer.epoch(*data, 7, epoch)
            losses.append([float(total), seen, *trainer.validate(*shard, 6 * dist.get_world_size())])
        digests.append([digest(trainer), losses])
    return digests


def all_validated(cases):
    return [validated(sizes) for sizes in cases]


def validated(sizes):
    """(loss, accuracy) over shards of these sizes, and those of one process over all of them."""
    images, labels = random_images(sum(sizes), seed=3)
    trainer = Trainer("own + SyncBatchNorm", RECIPE, 0)
    trainer.epoch(*random_images(40), 0, 1)
    rank = dist.get_rank()
    own = [part.split(sizes)[rank] for part in (images, labels)]
    found = trainer.validate(*own, sum(sizes))
    trainer.net.eval()
    with torch.no_grad():
        logits = trainer.net((images.double() - 127.5) / 127.5)
    loss = torch.nn.functional.cross_entropy(logits, labels)
    return list(found), [float(loss), float((logits.argmax(1) == labels).double().mean())]
