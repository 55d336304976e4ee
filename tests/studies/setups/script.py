"""A script that reads its arguments as it is imported, and trains under a guard."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=16)
args = parser.parse_args()


def setup():
    model = nn.Linear(8, args.width)
    return model, [torch.randn(4, 8)], lambda model, x: model(x).square().mean()


if __name__ == "__main__":
    raise SystemExit("the training began")
