"""A convolutional network with batch norm on a DataLoader that decodes slowly."""

import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Images(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        time.sleep(0.002)
        generator = torch.Generator().manual_seed(index)
        return torch.randn(3, 8, 8, generator=generator), index % 10


def loss(model, batch):
    images, labels = batch
    return nn.functional.cross_entropy(model(images), labels)


def setup(batch=4):
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 10),
    )
    loader = DataLoader(Images(), batch_size=batch, shuffle=True)
    return model, loader, loss, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
