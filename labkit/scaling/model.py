"""The decoder that is trained: its shape, parameters and FLOPs.

A product of (m, k) by (k, n) is 2mnk FLOPs. Every function takes one model or arrays of models alike.

Legend: L layers, h hidden, f ffn, V vocabulary, S sequence, b sequences.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Model:
    """A GPT- or Llama-like decoder. `ffn_gated`: three matrices in the feed-forward part (SwiGLU) instead of two.

    Without `kv_heads`, every head has keys and values of its own.
    """

    layers: int
    hidden: int
    heads: int
    ffn: int
    vocab: int
    kv_heads: int | None = None
    ffn_gated: bool = True
    tied: bool = False
    name: str = ""

    def __post_init__(self) -> None:
        for size in ("layers", "hidden", "heads", "ffn", "vocab"):
            if getattr(self, size) < 1:
                raise ValueError(f"expected {size} of 1 or more, got {getattr(self, size)}")
        if self.hidden % self.heads:
            raise ValueError(f"expected hidden to be a multiple of heads, got {self.hidden} and {self.heads}")
        if self.kv_heads is not None and (self.kv_heads < 1 or self.heads % self.kv_heads):
            raise ValueError(f"expected heads to be a multiple of kv_heads, got {self.heads} and {self.kv_heads}")
        if self.kv_heads is None:
            object.__setattr__(self, "kv_heads", self.heads)

    @property
    def groups(self) -> int:
        return self.kv_heads or self.heads


def kv_width(model: Any) -> Any:
    """Width of keys, and of values: h times kv_heads / heads."""
    return model.hidden * model.kv_heads / model.heads


def layer_parameters(model: Any) -> Any:
    """Parameters of a layer's matrices: query and output h*h, keys and values, two or three of h*f; two norms."""
    attention = 2 * model.hidden * (model.hidden + kv_width(model))
    return attention + (2 + model.ffn_gated) * model.hidden * model.ffn + 2 * model.hidden


def embedding_parameters(model: Any) -> Any:
    return model.vocab * model.hidden


def parameters(model: Any) -> Any:
    """All parameters; a tied model has one matrix for embedding and output."""
    return model.layers * layer_parameters(model) + (2 - model.tied) * embedding_parameters(model) + model.hidden


def step_flops(model: Any, *, seq_len: Any, sequences: Any, causal: bool = False) -> Any:
    """Model FLOPs of a step, forward and backward, without recomputation.

    6 a parameter of a matrix and token, and 12 L h S^2 a sequence for scores and values (PaLM, arXiv:2204.02311,
    appendix B); half of that if only the causal half is counted. Embedding lookups cost none.
    """
    matrices = model.layers * (layer_parameters(model) - 2 * model.hidden) + embedding_parameters(model)
    attention = 12 * model.layers * model.hidden * seq_len * (0.5 if causal else 1.0)
    return sequences * seq_len * (6 * matrices + attention)
