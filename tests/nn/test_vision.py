"""ResNet-50 has the published layout, and trains."""

import torch
from torch.nn.functional import cross_entropy

from labkit.nn.vision import ResNet50


def test_parameters_and_tensors_are_as_published():
    with torch.device("meta"):
        parameters = dict(ResNet50().named_parameters())
    assert sum(p.numel() for p in parameters.values()) == 25_557_032
    assert len(parameters) == 161
    assert max(p.numel() for p in parameters.values()) == 2_359_296
    assert parameters["layer4.0.downsample.0.weight"].shape == (2048, 1024, 1, 1)
    assert parameters["layer1.2.conv2.weight"].shape == (64, 64, 3, 3)


def test_images_become_logits_and_every_parameter_gets_a_gradient():
    torch.manual_seed(0)
    model = ResNet50(classes=7)
    images = torch.randn(2, 3, 64, 64)
    shapes = {}
    model.layer4.register_forward_hook(
        lambda _, __, output: shapes.update(layer4=tuple(output.shape))
    )
    loss = cross_entropy(model(images), torch.tensor([1, 2]))
    loss.backward()
    assert shapes["layer4"] == (2, 2048, 2, 2)
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())
