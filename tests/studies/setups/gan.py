"""Two networks with an optimizer each."""

import torch
from torch import nn


def setup():
    generator = nn.Linear(4, 8)
    critic = nn.Linear(8, 1)
    model = nn.ModuleDict({"generator": generator, "critic": critic})
    optimizers = [torch.optim.Adam(generator.parameters()), torch.optim.Adam(critic.parameters())]
    return model, [torch.randn(4, 4)], lambda model, noise: noise.sum(), optimizers
