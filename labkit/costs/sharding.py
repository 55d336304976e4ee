"""Formulas: bytes that each stage of ZeRO holds on a rank, and sends.

Source: Rajbhandari, Rasley, Ruwase & He 2020, arXiv:1910.02054: memory in section 3.1 and figure 1, bytes in section 7.
"""

from collections.abc import Mapping

from labkit.costs.communication import Calls
from labkit.costs.memory import FLOAT32
from labkit.costs.transformer import ADAMW_STATES

STAGES = ("ddp", "zero1", "zero2", "zero3")
"""What is sharded: nothing, optimizer state, also gradients, also parameters."""
PARTS = ("parameters", "gradients", "optimizer")


def state_bytes(n_parameters: int, stage: str, world_size: int) -> Mapping[str, float]:
    """Bytes that a rank holds from step to step, by part, in float32 with AdamW. ValueError for an unknown stage."""
    whole = {"parameters": n_parameters, "gradients": n_parameters, "optimizer": ADAMW_STATES * n_parameters}
    sharded = ("optimizer", "gradients", "parameters")[: STAGES.index(stage)]
    return {part: FLOAT32 * n / (world_size if part in sharded else 1) for part, n in whole.items()}


def sharding_calls(n_bytes: int, stage: str) -> list[Calls]:
    """List the collectives of one step for parameters of `n_bytes`. ValueError for an unknown stage."""
    averaged = Calls("all_reduce" if STAGES.index(stage) < 2 else "reduce_scatter", n_bytes, 1)
    return [averaged, Calls("all_gather", n_bytes, {"ddp": 0, "zero3": 2}.get(stage, 1))]
