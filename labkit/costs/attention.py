"""Costs of softmax attention: FLOPs, and the bytes of every tensor of naive ("explicit") attention.

Legend: b sequences (batch times heads), s queries and as many keys, d head dimension, e bytes per
element.

FLOPs are counted as in Dao 2023, FlashAttention-2 (arXiv:2307.08691), section 4.1: two matmuls of s
x s x d forward, five backward (one recomputes the scores), half of that if causal, whatever an
implementation does.
"""

# Five matmuls backward for two forward.
BACKWARD_OVER_FORWARD = 2.5


def forward_flops(b: int, s: int, d: int, *, causal: bool) -> float:
    """Floating-point operations of q k^T and P v; a multiplication and an addition are two."""
    full = 4.0 * b * s * s * d
    # The paper's convention, whether or not an implementation skips the masked half.
    if causal:
        return full / 2
    return full


def explicit_saved(b: int, s: int, d: int, e: int, *, causal: bool) -> dict[str, int]:
    """Bytes that naive attention holds between forward and backward, by tensor.

    Softmax saves its result, which the product with v needs as well. A causal mask takes a byte per
    score, once for all sequences.
    """
    vector = b * s * d * e
    saved = {"q": vector, "k": vector, "v": vector, "probabilities": b * s * s * e}
    if causal:
        saved["mask"] = s * s
    return saved


def tiled_saved(b: int, s: int, d: int, e: int) -> dict[str, int]:
    """The same for FlashAttention-2, tiled or in Triton: linear in s. The logsumexp is float32."""
    vector = b * s * d * e
    return {"q": vector, "k": vector, "v": vector, "output": vector, "logsumexp": b * s * 4}


def explicit_peak(b: int, s: int, d: int, e: int, *, causal: bool) -> dict[str, int]:
    """Bytes of naive attention at its peak, by tensor, inputs included.

    The peak is in the backward pass of softmax, which has the probabilities, their gradient and the
    scores' gradient.
    """
    vector = b * s * d * e
    matrix = b * s * s * e
    alive = explicit_saved(b, s, d, e, causal=causal)
    alive |= {"output": vector, "gradient of output": vector, "gradient of v": vector}
    return alive | {"gradient of probabilities": matrix, "gradient of scores": matrix}
