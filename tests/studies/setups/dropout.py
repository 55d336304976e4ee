"""A network with dropout and batch norm, whose running statistics evaluation mode uses."""

import torch
from torch import nn


def setup():
    model = nn.Sequential(
        nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 2)
    )
    batch = (torch.randn(16, 8), torch.randint(2, (16,)))
    return model, [batch], lambda model, b: nn.functional.cross_entropy(model(b[0]), b[1])
