"""A small GPT with attention by hand."""

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        batch, length, width = x.shape
        shape = (batch, length, self.heads, width // self.heads)
        q, k, v = (part.view(shape).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        scores = q @ k.transpose(-2, -1) / shape[-1] ** 0.5
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v
        return x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))


def loss(model, batch):
    tokens, targets = batch
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def setup(batch=2, length=16):
    model = nn.Sequential(nn.Embedding(64, 32), Block(32, 4), nn.Linear(32, 64))
    tokens = torch.randint(64, (batch, length + 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, [(tokens[:, :-1], tokens[:, 1:])], loss, optimizer
