"""Explicit softmax attention whose parts are named ranges for the profiler: the oracle's operations, in its order."""

import math

import torch
from torch import Tensor
from torch.profiler import record_function

from labkit.nn.attention import check_attention_inputs, softmax_scale

PARTS = ("scores", "mask", "softmax", "values")


def attention_in_parts(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """`labkit.nn.attention.naive_attention`, bit for bit, in the ranges "scores", "mask", "softmax", "values".

    q (..., Q, D), k and v (..., K, D) -> output (..., Q, D). The ranges cover the forward pass; backward operators
    run outside them. ValueError for inputs that do not fit.
    """
    check_attention_inputs(q, k, v)
    with record_function("scores"):
        scores = (q @ k.transpose(-2, -1)) * softmax_scale(q)  # (..., Q, K)
    if causal:
        with record_function("mask"):
            seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
            scores = scores.masked_fill(~seen, -math.inf)
    with record_function("softmax"):
        probabilities = torch.softmax(scores, dim=-1)
    with record_function("values"):
        return probabilities @ v
