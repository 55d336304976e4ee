"""Sizes of the Transformer, its parameters, and the FLOPs of its matmuls by part.

A matmul of (m, k) by (k, n) is 2*m*k*n FLOPs. Everything else (norms, softmax, activations, the
optimizer) is bound by memory and left out, as FLOP counters do.

Legend: B batch, S sequence, T = B*S tokens, d d_model, f d_ff, L layers, V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass

# Matmuls of the gradient of y = x w: one with respect to x, and one to w.
BACKWARD_OVER_FORWARD = 2
# Numbers of AdamW per parameter: the running means of the gradient and of its square.
ADAMW_STATES = 2


@dataclass(frozen=True)
class TransformerShape:
    """Sizes of a Transformer language model (`labkit.nn.transformer` builds it)."""

    d_model: int
    d_ff: int
    n_layers: int
    n_heads: int
    vocabulary: int = 10_000

    def __post_init__(self) -> None:
        if min(self.d_model, self.d_ff, self.n_layers, self.n_heads, self.vocabulary) < 1:
            raise ValueError(f"expected positive sizes, got {self}")
        # Even, since rotary positions rotate pairs of a head's numbers.
        if self.d_model % (2 * self.n_heads):
            raise ValueError(
                f"expected d_model to be n_heads times an even head dimension, got {self}"
            )

    @property
    def head_dim(self) -> int:
        return self.d_model // self.n_heads


# The published sizes, and two small ones that a CPU trains in a fraction of a second per step.
SIZES: Mapping[str, TransformerShape] = {
    "nano": TransformerShape(d_model=128, d_ff=512, n_layers=4, n_heads=4),
    "mini": TransformerShape(d_model=384, d_ff=1536, n_layers=6, n_heads=6),
    "small": TransformerShape(d_model=768, d_ff=3072, n_layers=12, n_heads=12),
    "medium": TransformerShape(d_model=1024, d_ff=4096, n_layers=24, n_heads=16),
    "large": TransformerShape(d_model=1280, d_ff=5120, n_layers=36, n_heads=20),
    "xl": TransformerShape(d_model=1600, d_ff=6400, n_layers=48, n_heads=25),
    "2.7B": TransformerShape(d_model=2560, d_ff=10240, n_layers=32, n_heads=32),
    "10B": TransformerShape(d_model=4608, d_ff=12288, n_layers=50, n_heads=36),
}


def n_parameters(shape: TransformerShape) -> int:
    """Return the parameters of a shape.

    Embedding and output V*d each, a layer 4*d^2 + 3*d*f and two norms of d, one norm at the end.
    """
    d = shape.d_model
    return 2 * shape.vocabulary * d + shape.n_layers * (4 * d**2 + 3 * d * shape.d_ff + 2 * d) + d


def forward_flops(shape: TransformerShape, batch: int, sequence: int) -> Mapping[str, int]:
    """Return FLOPs of one forward pass by part.

    Causal masking saves nothing here: the whole matrix is computed.
    """
    tokens = batch * sequence
    d = shape.d_model
    layers = shape.n_layers
    return {
        "projections": layers * 4 * 2 * tokens * d**2,
        "scores": layers * 2 * tokens * sequence * d,
        "values": layers * 2 * tokens * sequence * d,
        "feed_forward": layers * 3 * 2 * tokens * d * shape.d_ff,
        "output": 2 * tokens * d * shape.vocabulary,
    }


def backward_flops(shape: TransformerShape, batch: int, sequence: int) -> Mapping[str, int]:
    """FLOPs of one backward pass by part, without recomputation."""
    return {
        part: BACKWARD_OVER_FORWARD * n for part, n in forward_flops(shape, batch, sequence).items()
    }
