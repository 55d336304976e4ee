"""A model as users have: grouped heads, biases, norms of query heads, LoRA, and its plan."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from labkit.nn.attention import naive_attention

D = 16
HEADS = 4
GROUPS = 2
VOCABULARY = 14


class BiasedRMSNorm(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(d) + 0.5)
        self.bias = nn.Parameter(torch.randn(d) / 10)

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
        return x * scale * self.weight + self.bias


class LoRA(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Linear(base.in_features, 3, bias=False)
        self.b = nn.Linear(3, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base(x) + self.b(self.a(x))
        return result


class GroupedAttention(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.n_heads = HEADS
        self.n_groups = GROUPS
        self.head_dim = D // HEADS
        self.q = nn.Linear(D, D)
        self.k = nn.Linear(D, GROUPS * self.head_dim)
        self.v = nn.Linear(D, GROUPS * self.head_dim)
        self.o = nn.Linear(D, D)
        self.q_norm = BiasedRMSNorm(self.head_dim)
        self.temperature = nn.Parameter(torch.rand(HEADS, 1, 1) + 0.5)
        self.scale = nn.Parameter(torch.tensor(1.3))
        self.head_dropout = nn.Dropout(dropout)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        sizes = (*x.shape[:2], -1, self.head_dim)
        q = self.q_norm(self.q(x).view(sizes)).transpose(1, 2) * self.temperature * self.scale
        k, v = (
            y.view(sizes).transpose(1, 2).repeat_interleave(self.n_heads // self.n_groups, 1)
            for y in (self.k(x), self.v(x))
        )
        heads = self.head_dropout(naive_attention(q, k, v, True))
        result: Tensor = self.dropout(self.o(heads.transpose(1, 2).flatten(2)))
        return result


class Block(nn.Module):
    """Its feed-forward matrices are no layer of their own, so they are no block of a plan."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(D)
        self.norm2 = BiasedRMSNorm(D)
        self.attention = GroupedAttention(dropout)
        self.up = nn.Linear(D, 30)
        self.down = nn.Linear(30, D)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(gelu(self.up(self.norm2(x))))


class OwnModel(nn.Module):
    def __init__(self, *, is_tied: bool = False, has_lora: bool = False, dropout: float = 0.0):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, D, padding_idx=3)
        self.blocks = nn.Sequential(Block(dropout), Block(dropout))
        self.norm = nn.LayerNorm(D)
        self.head = nn.Linear(D, VOCABULARY, bias=not is_tied)
        if is_tied:
            self.head.weight = self.embedding.weight
        for block in self.blocks if has_lora else []:
            block.attention.q = LoRA(block.attention.q)
            block.attention.o = LoRA(block.attention.o)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.blocks(self.embedding(tokens))))
        return logits


PLAN = {
    "embedding": "vocabulary",
    "head": "vocabulary",
    "norm": "tokens",
    "*.norm?": "tokens",
    "*.attention": "block",
    "*.n_heads": "count",
    "*.n_groups": "count",
    "*.[qkv]": "rows",
    "*.q_norm": "heads",
    "*.temperature": "rows",
    "*.scale": "heads",
    "*.o": "columns",
    "*.attention.dropout": "tokens",
    "*.up": "rows",
    "*.down": "columns",
}
LORA_PLAN = {name: rule for name, rule in PLAN.items() if name not in ("*.[qkv]", "*.o")} | {
    "*.[kv]": "rows",
    "*.q.base": "rows",
    "*.q.a": "heads",  # gets the gradients of this rank's heads
    "*.q.b": "rows",
    "*.o.base": "columns",
    "*.o.a": "columns",
    "*.o.b": "tokens",
}


def build(seed: int = 0, **options: Any) -> OwnModel:
    torch.manual_seed(seed)
    return OwnModel(**options).double()
