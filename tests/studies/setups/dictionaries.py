"""A data set whose items are dictionaries."""

import torch
from torch import nn
from torch.utils.data import DataLoader


def setup(batch=4):
    items = [{"x": torch.randn(6), "y": torch.tensor(i % 2)} for i in range(16)]
    model = nn.Linear(6, 2)
    loader = DataLoader(items, batch_size=batch)
    return model, loader, lambda model, b: nn.functional.cross_entropy(model(b["x"]), b["y"])
