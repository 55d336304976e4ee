"""What data-parallel wrappers are measured with: a model and one random batch, by name."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from labkit.costs.transformer import n_parameters
from labkit.nn.transformer import SIZES, Transformer, language_model_loss, shape_named
from labkit.nn.vision import ResNet50

WORKLOADS = ("resnet50", *SIZES)
CLASSES = 1000


@dataclass(frozen=True)
class Workload:
    """`build` makes the model, on its device, the same one each time; `loss` is that of this rank's batch."""

    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module], Tensor]


def workload_named(
    name: str, *, batch: int, context_length: int = 128, image_size: int = 224, device: str = "cpu", seed: int = 0
) -> Workload:
    """ResNet-50 on images (batch, 3, image_size, image_size), or a Transformer on tokens (batch, context_length).

    `seed` decides the batch; the parameters are always the same. ValueError for a name that is none of `WORKLOADS`.
    """
    generator = torch.Generator().manual_seed(seed)
    if name == "resnet50":
        images = torch.randn(batch, 3, image_size, image_size, generator=generator).to(device)
        labels = torch.randint(CLASSES, (batch,), generator=generator).to(device)
        return Workload(lambda: _built(ResNet50, device), lambda model: cross_entropy(model(images), labels))
    shape = shape_named(name)
    tokens = torch.randint(shape.vocabulary, (batch, context_length + 1), generator=generator).to(device)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    return Workload(
        lambda: _built(lambda: Transformer(shape, context_length=context_length), device),
        lambda model: language_model_loss(model(inputs), targets),
    )


def _built(make: Callable[[], nn.Module], device: str) -> nn.Module:
    torch.manual_seed(0)
    with torch.device(device):
        return make()


def workload_parameters(name: str) -> int:
    """Parameters of a workload's model."""
    if name == "resnet50":
        return 25_557_032
    return n_parameters(shape_named(name))
