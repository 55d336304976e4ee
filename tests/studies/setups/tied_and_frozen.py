"""Tied embeddings and a frozen layer."""

import torch
from torch import nn


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.frozen(self.embedding(tokens)))


def setup():
    model = Language()
    tokens = torch.randint(32, (4, 8))
    trained = [one for one in model.parameters() if one.requires_grad]

    def loss(model, batch):
        return nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())

    return model, [tokens], loss, torch.optim.AdamW(trained)
