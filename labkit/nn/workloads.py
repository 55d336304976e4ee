"""What data-parallel wrappers are measured with: a model and one batch."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from labkit.costs.transformer import TransformerShape
from labkit.nn.training import Trained, random_tokens
from labkit.nn.transformer import Transformer, language_model_loss
from labkit.nn.vision import ResNet50

RESNET50 = "resnet50"
RESNET50_PARAMETERS = 25_557_032
CLASSES = 1000


@dataclass(frozen=True)
class Workload:
    """`build` makes the model, on its device, the same one each time; `loss` is that of this rank's batch."""

    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module], Tensor]

    def copied(self) -> "Workload":
        """The same, whose models are copies of one that is built now: drawing parameters takes ten times as long."""
        return replace(self, build=partial(copy.deepcopy, self.build()))


def workload_of(
    source: TransformerShape | Callable[[], Trained] | type[ResNet50],
    *,
    batch: int,
    context_length: int = 128,
    image_size: int = 224,
    device: str = "cpu",
    seed: int = 0,
) -> Workload:
    """A Transformer on tokens (batch, context_length), ResNet-50 on images (batch, 3, image_size, image_size), or what
    a function makes on the default device, which is called for every copy of the model.

    `seed` decides the batch, and what the loss of a function's model draws; the parameters are always the same.
    """
    generator = torch.Generator().manual_seed(seed)
    if isinstance(source, TransformerShape):
        inputs, targets = (tokens.to(device) for tokens in random_tokens(source, batch, context_length, generator))
        return Workload(
            lambda: _built(lambda: Transformer(source, context_length=context_length), device),
            lambda model: language_model_loss(model(inputs), targets),
        )
    if source is not ResNet50:
        return _made_by(cast(Callable[[], Trained], source), device, seed)
    images = torch.randn(batch, 3, image_size, image_size, generator=generator).to(device)
    labels = torch.randint(CLASSES, (batch,), generator=generator).to(device)
    return Workload(lambda: _built(ResNet50, device), lambda model: cross_entropy(model(images), labels))


def _made_by(source: Callable[[], Trained], device: str, seed: int) -> Workload:
    torch.manual_seed(seed)
    with torch.device(device):
        _, inputs, targets, loss = source()

    def seeded(model: nn.Module) -> Tensor:
        torch.manual_seed(seed)  # so that dropout leaves out the same in every wrapper
        return loss(model(inputs), targets)

    return Workload(lambda: _built(lambda: source().model, device), seeded)


def _built(make: Callable[[], nn.Module], device: str) -> nn.Module:
    torch.manual_seed(0)
    with torch.device(device):
        return make()
