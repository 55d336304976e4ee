"""The Transformer language model under study; its attention is an argument.

    x = embedding(tokens)
    for each layer:   x = x + attend(norm(x));   x = x + swiglu(norm(x))          (pre-norm)
    logits = output(norm(x))

RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467), rotary positions (Su et al. 2021,
arXiv:2104.09864), SwiGLU (Shazeer 2020, arXiv:2002.05202), no biases, embedding and output not
tied.

Dimension letters: B batch, S sequence, H heads, D head dimension, d d_model, f d_ff, V vocabulary.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, silu
from torch.utils.checkpoint import checkpoint

from labkit.costs.transformer import TransformerShape
from labkit.nn.attention import Attention, naive_attention

ROPE_BASE = 10_000.0


class Transformer(nn.Module):
    """Tokens (B, S), int64, to logits (B, S, V), with any attention (q, k, v, causal) -> output.

    With `checkpoint_segment` n > 0, only every n-th layer's input is kept for the backward pass,
    and the layers between are recomputed (Chen et al. 2016, arXiv:1604.06174). Built on the default
    device in the default dtype. For lower precision use autocast: casting the module would cast its
    rotation tables, too.
    """

    def __init__(
        self,
        shape: TransformerShape,
        *,
        context_length: int,
        attention: Attention = naive_attention,
        checkpoint_segment: int = 0,
    ):
        super().__init__()
        if context_length < 1 or checkpoint_segment < 0:
            got = f"got {context_length}, {checkpoint_segment}"
            raise ValueError(f"expected context_length >= 1 and checkpoint_segment >= 0, {got}")
        self.shape = shape
        self.checkpoint_segment = checkpoint_segment
        self.embedding = nn.Embedding(shape.vocabulary, shape.d_model)
        self.positions = RotaryPositions(context_length, shape.head_dim)
        layers = (TransformerLayer(shape, self.positions, attention) for _ in range(shape.n_layers))
        # Sequential, since checkpointing and pipelines take slices of it.
        self.layers = nn.Sequential(*layers)
        self.norm = RMSNorm(shape.d_model)
        self.output = Matrix(shape.d_model, shape.vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        context_length = self.positions.cosines.shape[0]
        if (
            tokens.dim() != 2
            or tokens.dtype != torch.int64
            or not 1 <= tokens.shape[1] <= context_length
        ):
            got = f"{tuple(tokens.shape)}, {tokens.dtype}"
            raise ValueError(
                f"expected int64 tokens (batch, 1 to {context_length} positions), got {got}"
            )
        x = self.embedding(tokens)  # (B, S, d)
        # Without a graph nothing is kept, so nothing need be computed again.
        if self.checkpoint_segment and torch.is_grad_enabled():
            for start in range(0, len(self.layers), self.checkpoint_segment):
                x = checkpoint(
                    self.layers[start : start + self.checkpoint_segment], x, use_reentrant=False
                )
        else:
            x = self.layers(x)
        logits: Tensor = self.output(self.norm(x))
        return logits


class TransformerLayer(nn.Module):
    """Attention and feed-forward, each behind a norm, on the residual stream (B, S, d)."""

    def __init__(self, shape: TransformerShape, positions: "RotaryPositions", attention: Attention):
        super().__init__()
        self.attention_norm = RMSNorm(shape.d_model)
        self.attention = SelfAttention(shape, positions, attention)
        self.feed_forward_norm = RMSNorm(shape.d_model)
        self.feed_forward = SwiGLU(shape.d_model, shape.d_ff)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        x = x + self.feed_forward(self.feed_forward_norm(x))
        return x


class SelfAttention(nn.Module):
    """Causal multi-head attention with rotary positions, (B, S, d) to (B, S, d)."""

    def __init__(self, shape: TransformerShape, positions: "RotaryPositions", attention: Attention):
        super().__init__()
        self.n_heads = shape.n_heads
        self.rotate = positions.forward  # shared by all layers, hence not a child module
        self.attend = attention
        d = shape.d_model
        self.queries, self.keys, self.values, self.output = (Matrix(d, d) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        projected = (project(x) for project in (self.queries, self.keys, self.values))
        # (B, H, S, D)
        q, k, v = (y.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for y in projected)
        heads = self.attend(self.rotate(q), self.rotate(k), v, True)
        joined: Tensor = self.output(heads.transpose(1, 2).flatten(2))
        return joined


class SwiGLU(nn.Module):
    """(silu(x gate) * (x up)) down, (B, S, d) to (B, S, d)."""

    def __init__(self, d_model: int, d_ff: int):
        super().__init__()
        self.gate = Matrix(d_model, d_ff)
        self.up = Matrix(d_model, d_ff)
        self.down = Matrix(d_ff, d_model)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(silu(self.gate(x)) * self.up(x))
        return result


class RMSNorm(nn.Module):
    """Compute x / sqrt(mean(x^2) + eps) * gain over the last dimension.

    In at least float32; the result has the dtype of x.
    """

    def __init__(self, d_model: int, *, eps: float = 1e-5):
        super().__init__()
        self.eps = eps
        self.gain = nn.Parameter(torch.ones(d_model))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.gain)

    def forward(self, x: Tensor) -> Tensor:
        return self.normalize(x, self.gain)

    def normalize(self, x: Tensor, gain: Tensor) -> Tensor:
        """Normalize x, (..., d), and multiply it by a gain, (d,)."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))  # squares overflow in float16
        scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps)
        return (wide * scale * gain).to(x.dtype)


class RotaryPositions(nn.Module):
    """Rotates each pair (x_2i, x_2i+1) of a head at position s by the angle s * base^(-2i/D).

    (..., S, D) to the same shape and dtype. No parameters. The tables of cosines and sines,
    (context, D/2), are computed in float64, stored in the default dtype, and left out of a
    `state_dict`.
    """

    cosines: Tensor
    sines: Tensor

    def __init__(self, context_length: int, head_dim: int):
        super().__init__()
        for name in ("cosines", "sines"):
            # Not persistent: a checkpoint would fix the context length.
            self.register_buffer(name, torch.empty(context_length, head_dim // 2), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill the tables; called again for modules that were built on the meta device."""
        context_length, pairs_per_head = self.cosines.shape
        # In float64, as the angle of a late position is thousands of turns, of which only the last
        # one counts. On the CPU: not every device has float64.
        pairs = torch.arange(0, 2 * pairs_per_head, 2, dtype=torch.float64, device="cpu")
        positions = torch.arange(context_length, dtype=torch.float64, device="cpu")
        angles = torch.outer(positions, ROPE_BASE ** (-pairs / (2 * pairs_per_head)))
        self.cosines.copy_(angles.cos())
        self.sines.copy_(angles.sin())

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Rotate x; `positions`, (S,), int64, are those of its rows, by default from 0."""
        # A rank of context parallelism has positions from anywhere in the sequence.
        rows = slice(x.shape[-2]) if positions is None else positions
        cosines = self.cosines[rows]
        sines = self.sines[rows]
        even = x[..., 0::2]
        odd = x[..., 1::2]
        rotated = torch.stack([even * cosines - odd * sines, even * sines + odd * cosines], dim=-1)
        return rotated.flatten(-2).to(x.dtype)  # the tables' dtype is the wider one under autocast


class Matrix(nn.Linear):
    """A matrix without bias, normal with variance 2 / (n_in + n_out) (Glorot and Bengio 2010)."""

    def __init__(self, n_in: int, n_out: int):
        super().__init__(n_in, n_out, bias=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=math.sqrt(2 / (self.in_features + self.out_features)))


def language_model_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of logits (B, S, V) against targets (B, S), a scalar."""
    return cross_entropy(logits.flatten(0, 1), targets.flatten())
