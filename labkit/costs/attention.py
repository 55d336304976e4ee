"""Costs of softmax attention: FLOPs, and the bytes of every tensor of the naive version.

Legend: b sequences (batch times heads), s queries and as many keys, d head dimension, e bytes per element.

FLOPs are counted as in Dao 2023, FlashAttention-2 (arXiv:2307.08691), section 4.1: two matmuls of s x s x d forward,
five backward (one of them forms the scores again), half of that if causal. An implementation may do more or less than
is counted, so that rates are of useful work.
"""

BACKWARD_OVER_FORWARD = 2.5
"""Five products of matrices backward for two forward."""


def forward_flops(b: int, s: int, d: int, *, causal: bool) -> float:
    """Floating-point operations of q k^T and P v, a multiplication and an addition being two."""
    full = 4.0 * b * s * s * d
    return full / 2 if causal else full


def backward_flops(b: int, s: int, d: int, *, causal: bool) -> float:
    return BACKWARD_OVER_FORWARD * forward_flops(b, s, d, causal=causal)


def matrix_bytes(b: int, s: int, e: int) -> int:
    """One (b, s, s) matrix: scores, probabilities, or the gradient of either."""
    return b * s * s * e


def explicit_saved(b: int, s: int, d: int, e: int, *, causal: bool) -> dict[str, int]:
    """Bytes that the explicit version holds between forward and backward, tensor by tensor.

    Softmax keeps its result, which the product with v needs as well; the scores themselves are not needed again.
    Causal: where the mask hides a score is kept too, a byte each, once for all sequences.
    """
    vector = b * s * d * e
    saved = {"q": vector, "k": vector, "v": vector, "probabilities": matrix_bytes(b, s, e)}
    return saved | ({"mask": s * s} if causal else {})


def tiled_saved(b: int, s: int, d: int, e: int) -> dict[str, int]:
    """The same for FlashAttention-2, tiled or in Triton: linear in s. The logsumexp is float32."""
    vector = b * s * d * e
    return {"q": vector, "k": vector, "v": vector, "output": vector, "logsumexp": b * s * 4}


def explicit_peak(b: int, s: int, d: int, e: int, *, causal: bool) -> dict[str, int]:
    """Every tensor of the explicit version that lives when most do, in bytes; inputs included.

    That moment is inside the backward of softmax: the probabilities, their gradient, and the gradient of the scores,
    which is made of the two.
    """
    vector, matrix = b * s * d * e, matrix_bytes(b, s, e)
    alive = explicit_saved(b, s, d, e, causal=causal)
    alive |= {"output": vector, "gradient of output": vector, "gradient of v": vector}
    return alive | {"gradient of probabilities": matrix, "gradient of scores": matrix}
