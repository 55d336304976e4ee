"""A mixture of experts, one of which no row of the batch takes."""

import torch
from torch import nn


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        half = len(x) // 2
        return torch.cat([self.experts[0](x[:half]), self.experts[1](x[half:])])


def setup():
    model = Mixture()
    return model, [torch.randn(8, 8)], lambda model, x: model(x).square().mean()
