"""Setups with a planted cause, and the same without it, between which planted_causes.py compares.

A planted line is recognized by its comment.
"""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

LATE_RANK = 1


class Attention(nn.Module):
    def forward(self, x):
        return x + (x @ x.transpose(-2, -1) / 8).softmax(-1) @ x  # attention by hand


class PerRow(nn.Module):
    def forward(self, x):
        return x + torch.stack([row * row.std() for row in x])  # a loop over the batch


def narrow(middle=None):
    return nn.Sequential(nn.Linear(64, 64), middle or nn.Identity(), nn.Linear(64, 64))


def wide():
    return nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 64))


def mean_square(model, x):
    return model(x).square().mean()


def training(model, batches, loss=mean_square, **options):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, **options)
    return model, batches, loss, optimizer


def collate_slowly(rows):
    time.sleep(0.02)  # a slow disk
    return torch.stack(rows)


def loader(is_planted=True):
    # A second thread sleeps with the loader, and takes 15 ms to wake up every third time, in a
    # plain loop and in the lab: the size of the cause would be chance.
    torch.set_num_threads(1)
    collate = collate_slowly if is_planted else torch.stack
    rows = list(torch.randn(256, 64))
    return training(narrow(), DataLoader(rows, batch_size=8, collate_fn=collate))


def attention(is_planted=True, tokens=1024):
    middle = Attention() if is_planted else None
    return training(narrow(middle), [torch.randn(4, tokens, 64)])


def loop(is_planted=True, batch=256):
    middle = PerRow() if is_planted else None
    return training(narrow(middle), [torch.randn(batch, 64)])


def compute_twice(model, x):
    mean_square(model, x)  # an unused forward
    return mean_square(model, x)


def unused(is_planted=True):
    return training(
        wide(), [torch.randn(4, 1024, 64)], compute_twice if is_planted else mean_square
    )


def read_loss(model, x):
    loss = mean_square(model, x)
    loss.item()  # needless
    return loss


def item(is_planted=True):
    return training(wide(), [torch.randn(4, 1024, 64)], read_loss if is_planted else mean_square)


def optimizer(is_planted=True, layers=150, width=32):
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])
    options = {"foreach": False} if is_planted else {"fused": True}
    return training(model, [torch.randn(4, width)], **options)


def compute_late(model, x):
    if not dist.is_initialized() or dist.get_rank() == LATE_RANK:
        time.sleep(0.2)
    return mean_square(model, x)


def rank(is_planted=True):
    return training(narrow(), [torch.randn(256, 64)], compute_late if is_planted else mean_square)
