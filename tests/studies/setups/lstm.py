"""An LSTM on sequences; the last state is classified."""

import torch
from torch import nn


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 16, batch_first=True)
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


def setup():
    model = Reader()
    batches = [(torch.randn(4, 5, 8), torch.randint(3, (4,))) for _ in range(3)]
    return model, batches, lambda model, b: nn.functional.cross_entropy(model(b[0]), b[1])
