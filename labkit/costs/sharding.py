"""What each stage of ZeRO holds on a rank, and sends: formulas.

Source: Rajbhandari, Rasley, Ruwase & He 2020, arXiv:1910.02054: memory in section 3.1 and figure 1, bytes in section 7.
Some parameters may be replicated (FSDP's scalars).
"""

from collections.abc import Mapping

STAGES = ("ddp", "zero1", "zero2", "zero3")
"""What is sharded: nothing, optimizer state, also gradients, also parameters."""
PARTS = ("parameters", "gradients", "optimizer")
FLOAT32 = 4


def state_bytes(n_parameters: int, stage: str, world_size: int, *, replicated: int = 0) -> Mapping[str, float]:
    """Bytes that a rank holds from step to step, by part; the optimizer has two numbers per parameter.

    `replicated` parameters are whole on every rank of stage "zero3". ValueError for another stage than `STAGES`.
    """
    _check_stage(stage)
    sharded_from = {"parameters": "zero3", "gradients": "zero2", "optimizer": "zero1"}
    whole = replicated if stage == "zero3" else 0
    share = whole + (n_parameters - whole) / world_size
    return {
        part: FLOAT32
        * (2 if part == "optimizer" else 1)
        * (share if STAGES.index(stage) >= STAGES.index(first) else n_parameters)
        for part, first in sharded_from.items()
    }


def moved_bytes(n_bytes: int, stage: str, *, replicated_bytes: int = 0) -> Mapping[str, int]:
    """Bytes of the tensors that collectives of one step are called with, by collective.

    A reduce-scatter or all-gather of n bytes sends n (p-1)/p per rank, an all-reduce twice that.
    """
    _check_stage(stage)
    if stage == "zero3":
        sharded = n_bytes - replicated_bytes
        return {"all_gather": 2 * sharded, "reduce_scatter": sharded, "all_reduce": replicated_bytes}
    averaged = "reduce_scatter" if stage == "zero2" else "all_reduce"
    return {averaged: n_bytes} | ({} if stage == "ddp" else {"all_gather": n_bytes})


def _check_stage(stage: str) -> None:
    if stage not in STAGES:
        raise ValueError(f"expected a stage among {', '.join(STAGES)}, got {stage!r}")
