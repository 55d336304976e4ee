"""What is run to measure one point of the FlashAttention lab. Imports torch and the instruments only.

By `sweep`: "lengths", the passes of all implementations; "techniques", the forward kernel with one technique left out;
"hidden", tiled attention causal and full.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from labkit.nn.attention_implementations import attention_named
from labkit.nn.attention_problem import AttentionProblem, check
from labkit.nn.tiled_attention import tile_side
from labkit.studies.shared.alternatives import row_of, timed_rows
from labkit.studies.shared.attention_passes import PassesPoint, gate_of, measure_passes, problem_of

ALL_TECHNIQUES = "all techniques"
TECHNIQUES = ("exp2", "skip_hidden", "mask_only_edges")
"""Techniques that recorded runs left out, one by one."""
KERNEL_CALLS = 10
"""In a row for a sample of a kernel's time: one alone takes as long as its launch."""
FULL, CAUSAL = "tiled, full", "tiled, causal"
KERNEL = "kernel"
"""The phase of a forward pass by itself."""


@dataclass(frozen=True, kw_only=True)
class FlashPoint(PassesPoint):
    """Causal attention of one sequence."""

    batch: int = 1
    causal: bool = True

    def title(self) -> str:
        return super().title() if self.sweep == "lengths" else f"{self.sweep}, {super().title()}"


def measure_point(point: FlashPoint) -> Iterator[dict[str, Any]]:
    """Rows of the sweep that the point belongs to."""
    match point.sweep:
        case "techniques":
            yield from _techniques(point)
        case "hidden":
            yield from _hidden(point)
        case _:
            yield from measure_passes(point)


def _techniques(point: FlashPoint) -> Iterator[dict[str, Any]]:
    """The forward kernel, checked first; its techniques cannot be left out any more."""
    flash = attention_named("flash")
    reason = flash.unavailable_reason(torch.device(point.device), point.torch_dtype, point.head_dim)
    if reason is not None:
        yield {"implementation": "flash", "phase": KERNEL, "check": reason}
        return
    from labkit.nn.flash_attention import flash_forward

    problem = problem_of(point)
    q, k, v = (x.detach() for x in problem.inputs)
    contenders = {ALL_TECHNIQUES: (problem, partial(flash_forward, q, k, v, point.causal))}
    yield from _checked_and_timed(point, contenders, calls=KERNEL_CALLS)


def _hidden(point: FlashPoint) -> Iterator[dict[str, Any]]:
    """The forward pass of tiled attention with the mask, where hidden tiles are skipped, and without."""
    attend = attention_named("tiled").attend
    contenders: dict[str, tuple[AttentionProblem, Callable[[], Any]]] = {}
    for name, causal in ((FULL, False), (CAUSAL, True)):
        shape = (point.batch, point.sequence, point.head_dim)
        problem = AttentionProblem(shape, point.torch_dtype, point.device, causal=causal, seed=point.seed)
        q, k, v = (x.detach() for x in problem.inputs)
        contenders[name] = problem, partial(attend, q, k, v, causal)
    tiles = max(1.0, point.sequence / tile_side(q))
    for row in _checked_and_timed(point, contenders):
        yield row | {"tiles": tiles}


def _checked(problem: AttentionProblem, action: Callable[[], Any]) -> dict[str, Any]:
    result = action()  # flash_forward gives the logsumexp as well
    checked = check(problem, [result[0] if isinstance(result, tuple) else result])
    return {"check": gate_of(checked), "error": checked.error}


def _checked_and_timed(
    point: FlashPoint, contenders: Mapping[str, tuple[AttentionProblem, Callable[[], Any]]], *, calls: int = 1
) -> Iterator[dict[str, Any]]:
    """Gate each output, then time those that are right in turns."""
    rows = {
        name: {"implementation": name, "phase": KERNEL} | row_of(name, partial(_checked, *one), device=point.device)
        for name, one in contenders.items()
    }
    options = point.rounds | {"warmup": max(1, point.warmup), "calls": calls, "device": point.device}
    yield from timed_rows(rows, {name: action for name, (_, action) in contenders.items()}, **options)
