"""When each kind of parallelism breaks even: seconds of compute over seconds of its communication, as formulas.

Legend: C FLOP/s that matmuls reach on a GPU, B bytes/s around the ring of a group, T tokens per replica and step,
t per micro-batch and rank; P parameters of a layer, h hidden, q query width, k key width, S sequence; m micro-batches.
Constants that hide communication or slow down a call are left out: these are limits, and `predict` has the rest.
"""

from dataclasses import dataclass

import numpy as np

from labkit.scaling.communication import group
from labkit.scaling.compute import BF16
from labkit.scaling.constants import Rows
from labkit.scaling.model import Numbers
from labkit.scaling.runs import Runs


@dataclass(frozen=True)
class Kind:
    """A kind of parallelism: its name, the part of a step that it costs, and the formula of its ratio."""

    name: str
    part: str
    formula: str


KINDS = (
    Kind("data", "data_parallel_s", "3 T B / (2 C), gradients of 2 bytes; half of it for 4 bytes"),
    Kind("sharding", "gather_s", "t B / C: every micro-batch gathers all parameters"),
    Kind("tensor", "tensor_parallel_s", "3 P B / (8 h C) over the other ranks, tp - 1"),
    Kind("context", "context_parallel_s", "7 S q B / (12 k C) over the other ranks, cp - 1"),
    Kind("pipeline", "bubble_s", "m vp over the other stages, pp - 1"),
)


def compute_comm_ratio(runs: Runs, constants: Rows) -> dict[str, Numbers]:
    """Compute over communication (pipeline: busy over idle) by kind, (n,); nan in runs that do not use the kind.

    Below 1 a step is mostly communication, however well it overlaps. Data: 6 FLOPs and 2 g (n-1)/n bytes per
    parameter, once a step (the scaling book, "Training"). Sharding: three half rings of 2 bytes per micro-batch
    (arXiv:1910.02054). Tensor: four all-reduces of 2 h bytes per token and layer (arXiv:1909.08053). Context: keys and
    values twice and their gradients around the ring, behind attention (arXiv:2310.01889). Pipeline: (pp - 1) / (m vp)
    of the time (arXiv:2104.04473).
    """
    n, fp8 = runs.dp * runs.cp, np.where(runs.precision == "fp8", runs.fp8_ratio * constants["fp8_efficiency"], 1.0)
    peak = runs.peak_tflops * 1e12 * runs.clock_share
    rate = peak * constants["gemm_efficiency"] * fp8
    replicas, tensor = group(runs, constants, n, runs.tp), group(runs, constants, runs.tp, np.ones(len(runs)))
    context = group(runs, constants, runs.cp, runs.tp)
    gathers = np.isin(runs.shard, ("zero3", "hsdp"))
    per_step = 3 * runs.micro_batches * runs.tokens / constants["gradient_bytes"]
    others = np.maximum(n - 1, 1) / n
    layer = 6 * runs.layer_parameters / (8 * BF16 * runs.hidden)
    attention = 7 * runs.seq_len * runs.query_width / (6 * BF16 * runs.kv_width)
    attention_rate = peak * constants["attention_efficiency"]
    ratios = {
        "data": (per_step * replicas.bytes_per_s / rate / others, (n > 1) & ~gathers),
        "sharding": (runs.tokens * replicas.bytes_per_s / rate / others, (n > 1) & gathers),
        "tensor": (layer * tensor.bytes_per_s / rate / np.maximum(runs.tp - 1, 1), runs.tp > 1),
        "context": (attention * context.bytes_per_s / attention_rate / np.maximum(runs.cp - 1, 1), runs.cp > 1),
        "pipeline": (runs.micro_batches * runs.vp / np.maximum(runs.pp - 1, 1), runs.pp > 1),
    }
    return {name: np.where(used, values, np.nan) for name, (values, used) in ratios.items()}
