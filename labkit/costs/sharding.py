"""What each stage of ZeRO should hold on a rank, and send: formulas.

Source: Rajbhandari, Rasley, Ruwase & He 2020, arXiv:1910.02054: memory in section 3.1 and figure 1, bytes in section 7.

Legend: N parameters, p ranks, Psi bytes of all parameters. Some parameters may be replicated (FSDP's biases and norms).
"""

from collections.abc import Mapping

STAGES = ("ddp", "zero1", "zero2", "zero3")
"""What is sharded: nothing, optimizer state, also gradients, also parameters."""
PARTS = ("parameters", "gradients", "optimizer")


def state_bytes(
    n_parameters: int, stage: str, world_size: int, *, replicated: int = 0, itemsize: int = 4, states: int = 2
) -> Mapping[str, float]:
    """Bytes that a rank holds from step to step, by part; `states` are the optimizer's values per parameter.

    Of N parameters, `replicated` are whole on every rank of stage "zero3". ValueError for another stage than `STAGES`.
    """
    _check(stage)
    sharded_from = {"parameters": "zero3", "gradients": "zero2", "optimizer": "zero1"}
    values = {"parameters": 1, "gradients": 1, "optimizer": states}
    whole = replicated if stage == "zero3" else 0
    share = whole + (n_parameters - whole) / world_size
    return {
        part: itemsize * values[part] * (share if STAGES.index(stage) >= STAGES.index(first) else n_parameters)
        for part, first in sharded_from.items()
    }


def moved_bytes(n_bytes: int, stage: str, *, replicated_bytes: int = 0) -> Mapping[str, int]:
    """Bytes of the tensors that collectives of one step are called with, by collective.

    A reduce-scatter or all-gather of n bytes sends n (p-1)/p per rank, an all-reduce twice that.
    """
    _check(stage)
    if stage == "zero3":
        sharded = n_bytes - replicated_bytes
        return {"all_gather": 2 * sharded, "reduce_scatter": sharded, "all_reduce": replicated_bytes}
    averaged = "reduce_scatter" if stage == "zero2" else "all_reduce"
    return {averaged: n_bytes} | ({} if stage == "ddp" else {"all_gather": n_bytes})


def sent_bytes(n_bytes: int, stage: str, world_size: int, *, replicated_bytes: int = 0) -> float:
    """Bytes that a rank sends per step: 2 Psi (p-1)/p, or 3 for "zero1" after an all-reduce and for "zero3"."""
    moved = moved_bytes(n_bytes, stage, replicated_bytes=replicated_bytes)
    phases = sum(n * (2 if name == "all_reduce" else 1) for name, n in moved.items())
    return phases * (world_size - 1) / world_size


def _check(stage: str) -> None:
    if stage not in STAGES:
        raise ValueError(f"expected a stage among {', '.join(STAGES)}, got {stage!r}")
