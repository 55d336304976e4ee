"""A model that takes keywords and returns an object with its loss, as Hugging Face's."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass
class Output:
    loss: Tensor
    logits: Tensor


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, input_ids, attention_mask, labels):
        weights = attention_mask.unsqueeze(-1)
        logits = self.head((self.embedding(input_ids) * weights).sum(1) / weights.sum(1))
        return Output(nn.functional.cross_entropy(logits, labels), logits)


def setup():
    model = Classifier()
    batch = {
        "input_ids": torch.randint(32, (8, 6)),
        "attention_mask": torch.ones(8, 6),
        "labels": torch.randint(4, (8,)),
    }
    return model, [batch], lambda model, batch: model(**batch).loss
