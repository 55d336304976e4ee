"""Memory of a training step of the Transformer: formulas, tensor by tensor.

Parameters, gradients and AdamW's two states are float32: 4, 4 and 8 bytes per parameter. Attention
is naive. On `device` "cuda" autocast computes the softmax in float32, and AdamW updates all
parameters together.

Legend: B batch, S sequence, T = B*S tokens, d d_model, f d_ff, H heads, L layers, V vocabulary, N
parameters.
"""

import math
from collections.abc import Mapping

from labkit.costs.communication import STAGES
from labkit.costs.transformer import ADAMW_STATES, TransformerShape, n_parameters

FLOAT32 = 4
LOW_PRECISION = 2
# Bytes of a parameter, its gradient, and AdamW's running means.
STATES_BYTES = (2 + ADAMW_STATES) * FLOAT32
PARTS = ("parameters", "gradients", "optimizer")
# Plans allow 10% more than the formulas, which leave out what operators allocate for a moment.
HEADROOM = 1.1


def state_bytes(n_parameters: int, stage: str = "ddp", world_size: int = 1) -> Mapping[str, float]:
    """Return bytes that a rank holds between steps, by part, in float32 with AdamW.

    ZeRO-2 has its share of the parameters for the optimizer, and all of them for the model.
    ValueError for an unknown stage.

    Source: Rajbhandari, Rasley, Ruwase & He 2020, ZeRO (arXiv:1910.02054), section 3.1 and figure
    1, whose optimizer state has that share.
    """
    whole = {
        "parameters": n_parameters,
        "gradients": n_parameters,
        "optimizer": ADAMW_STATES * n_parameters,
    }
    sharded = ("optimizer", "gradients", "parameters")[: STAGES.index(stage)]
    ranks = dict.fromkeys(PARTS, 1) | dict.fromkeys(sharded, world_size)
    held = {part: FLOAT32 * n / ranks[part] for part, n in whole.items()}
    if stage == "zero2":
        held["parameters"] += FLOAT32 * n_parameters / world_size
    return held


def saved_by_layer(
    shape: TransformerShape,
    batch: int,
    sequence: int,
    precision: str = "float32",
    *,
    device: str = "cpu",
) -> Mapping[str, int]:
    """Return bytes that one layer saves for backward, by tensor.

    Its input, the residual stream, is one of them.

    A norm saves its input, the scaled input (for the gain) and the scale of each token. A matmul
    saves its input. Softmax saves its result, which the product with the values shares; `silu(gate)
    * up` saves gate, silu and up. Under autocast, a matmul reads copies in `precision`: of its
    input, once per matmul, and of its weight. CPU autocast computes the softmax in `precision`,
    CUDA's in float32, with a copy for the matmul.
    """
    tokens = batch * sequence
    d = shape.d_model
    f = shape.d_ff
    low = FLOAT32
    softmax = FLOAT32
    copies_of_weights = 0
    # Autocast gives each matmul a copy of its own; in float32 all read one tensor.
    readers_of_first_input = 1
    readers_of_second_input = 1
    if precision != "float32":
        low = LOW_PRECISION
        softmax = LOW_PRECISION
        if device.startswith("cuda"):
            softmax = FLOAT32 + LOW_PRECISION
        copies_of_weights = LOW_PRECISION * (4 * d**2 + 3 * d * f)
        readers_of_first_input = 3
        readers_of_second_input = 2
    scores = batch * shape.n_heads * sequence**2
    return {
        "norms: inputs": 2 * FLOAT32 * tokens * d,
        "norms: scaled inputs": 2 * FLOAT32 * tokens * d,
        "norms: scales": 2 * FLOAT32 * tokens,
        "input of q, k, v": readers_of_first_input * low * tokens * d,
        "rotated q, k, and v": 3 * low * tokens * d,
        "attention probabilities": softmax * scores,
        "causal mask": sequence**2,
        "input of the attention output": low * tokens * d,
        "input of gate and up": readers_of_second_input * low * tokens * d,
        "gate, silu, up, product": 4 * low * tokens * f,
        "copies of weights": copies_of_weights,
    }


def saved_by_head(
    shape: TransformerShape, batch: int, sequence: int, precision: str = "float32"
) -> int:
    """Return bytes that the last norm, output matrix and loss save.

    Most are float32 log-probabilities (T, V).
    """
    tokens = batch * sequence
    d = shape.d_model
    low = FLOAT32
    copy = 0
    if precision != "float32":
        low = LOW_PRECISION
        copy = LOW_PRECISION * shape.vocabulary * d  # of the output matrix
    return FLOAT32 * tokens * (2 * d + 1 + shape.vocabulary) + low * tokens * d + copy


def activation_bytes(
    shape: TransformerShape,
    batch: int,
    sequence: int,
    precision: str = "float32",
    checkpoint_segment: int = 0,
    *,
    device: str = "cpu",
) -> int:
    """Return bytes alive between forward and backward.

    With checkpointing, one residual stream per segment, and the head.
    """
    head = saved_by_head(shape, batch, sequence, precision)
    if checkpoint_segment:
        segments = math.ceil(shape.n_layers / checkpoint_segment)
        return head + segments * FLOAT32 * batch * sequence * shape.d_model
    return head + shape.n_layers * sum(
        saved_by_layer(shape, batch, sequence, precision, device=device).values()
    )


def peak_bytes(
    shape: TransformerShape,
    batch: int,
    sequence: int,
    *,
    is_full_step: bool = True,
    precision: str = "float32",
    checkpoint_segment: int = 0,
    device: str = "cpu",
) -> int:
    """Return peak bytes of a full step with AdamW's states, or of a forward pass.

    A forward pass peaks at the loss.

    A full step peaks in one of three places: as backward begins, with all activations and two
    gradients of the logits; with checkpointing, in the segment that is recomputed; or in the
    optimizer, with all gradients and AdamW's temporaries: two of the largest parameter, on CUDA one
    of every parameter. Gradients that are allocated while activations are freed are left out, so
    the measured peak is a few percent higher (tested).
    """
    states = {part: int(n_bytes) for part, n_bytes in state_bytes(n_parameters(shape)).items()}
    logits = FLOAT32 * batch * sequence * shape.vocabulary
    # The loss reads float32 logits: under autocast a copy of the ones in low precision.
    read = logits
    if precision != "float32":
        read += logits * LOW_PRECISION // FLOAT32
    activations = activation_bytes(
        shape, batch, sequence, precision, checkpoint_segment, device=device
    )
    if not is_full_step:
        return states["parameters"] + activations + read
    resting = states["parameters"] + states["optimizer"]
    again = 0
    if checkpoint_segment:
        layer = sum(saved_by_layer(shape, batch, sequence, precision, device=device).values())
        head = saved_by_head(shape, batch, sequence, precision)
        again = activations - head + min(checkpoint_segment, shape.n_layers) * layer
    # AdamW's foreach operators on CUDA have a temporary of every parameter at once; on a CPU it
    # goes parameter by parameter.
    temporaries = states["parameters"]
    if not device.startswith("cuda"):
        temporaries = 2 * FLOAT32 * max(shape.vocabulary, shape.d_ff) * shape.d_model
    optimizing = states["gradients"] + temporaries
    return resting + max(activations + 2 * logits, again, optimizing)
