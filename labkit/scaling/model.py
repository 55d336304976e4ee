"""The decoder that is trained: its shape, parameters and FLOPs.

A matmul of (m, k) by (k, n) is 2mnk FLOPs. Every function takes one model or arrays of models alike.

Legend: L layers, h hidden, q width of all query heads, f ffn, V vocabulary, S sequence, b sequences.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Model:
    """A GPT- or Llama-like decoder. `ffn_gated`: three matrices in the feed-forward part (SwiGLU) instead of two.

    Defaults: `kv_heads` is `heads`, `head_dim` is `hidden` / `heads`.
    """

    layers: int
    hidden: int
    heads: int
    ffn: int
    vocab: int
    kv_heads: int = 0
    head_dim: int = 0
    ffn_gated: bool = True
    tied: bool = False
    name: str = ""

    def __post_init__(self) -> None:
        for size in ("layers", "hidden", "heads", "ffn", "vocab"):
            if getattr(self, size) < 1:
                raise ValueError(f"expected {size} of 1 or more, got {getattr(self, size)}")
        if not self.head_dim and self.hidden % self.heads:
            raise ValueError(f"expected hidden to be a multiple of heads, got {self.hidden} and {self.heads}")
        if self.kv_heads < 0 or self.head_dim < 0 or (self.kv_heads and self.heads % self.kv_heads):
            raise ValueError(f"expected heads to be a multiple of kv_heads, got {self.heads} and {self.kv_heads}")
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        object.__setattr__(self, "head_dim", self.head_dim or self.hidden // self.heads)


def query_width(model: Any) -> Any:
    """Width of all query heads together; hidden in most models."""
    return model.heads * model.head_dim


def kv_width(model: Any) -> Any:
    """Width of all key heads together, and of all value heads."""
    return model.kv_heads * model.head_dim


def layer_parameters(model: Any) -> Any:
    """Parameters of a layer: query and output h*q, keys and values, two or three of h*f, two norms."""
    attention = 2 * model.hidden * (query_width(model) + kv_width(model))
    return attention + (2 + model.ffn_gated) * model.hidden * model.ffn + 2 * model.hidden


def embedding_parameters(model: Any) -> Any:
    return model.vocab * model.hidden


def parameters(model: Any) -> Any:
    """All parameters; a tied model has one matrix for embedding and output."""
    return model.layers * layer_parameters(model) + (2 - model.tied) * embedding_parameters(model) + model.hidden


def step_flops(model: Any, *, seq_len: Any, sequences: Any, causal: bool = False) -> Any:
    """Model FLOPs of a step, forward and backward, without recomputation.

    6 per matrix parameter and token, and 12 L q S^2 per sequence for scores and values (PaLM, arXiv:2204.02311,
    appendix B); half of the latter with `causal`. Embedding lookups cost none.
    """
    matrices = model.layers * (layer_parameters(model) - 2 * model.hidden) + embedding_parameters(model)
    attention = 12 * model.layers * query_width(model) * seq_len * (0.5 if causal else 1.0)
    return sequences * seq_len * (6 * matrices + attention)
