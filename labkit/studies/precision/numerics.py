"""What rounding does: a sum of many small numbers, and a layer norm step by step, against float64.

No operator here is written to fail: each line is what a reader would write, in the dtype that is looked at. Sums
inside one operator (`mean`) are torch's, which accumulates 16-bit inputs in float32 and rounds the result.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

NORM_EPS = 1e-5
NORM_STEPS = ("mean", "centered", "squares", "variance", "rsqrt", "output")


@dataclass(frozen=True)
class Accumulation:
    """How a term is added to a sum: the dtype of the sum, that of the term, and whether the term is cast first."""

    sum_dtype: str
    term_dtype: str
    cast: bool = False


ACCUMULATIONS: Mapping[str, Accumulation] = {
    "fp32": Accumulation("float32", "float32"),
    "fp16": Accumulation("float16", "float16"),
    "fp16_into_fp32": Accumulation("float32", "float16"),
    "fp16_cast_to_fp32": Accumulation("float32", "float16", cast=True),
    "bf16": Accumulation("bfloat16", "bfloat16"),
    "bf16_into_fp32": Accumulation("float32", "bfloat16"),
}


def accumulate(name: str, *, term: float, additions: int, device: str) -> Iterator[dict[str, Any]]:
    """Add `term` again and again; one row at 1, 2, 5, 10, 20, ... additions and at the last.

    `sum` is what came out; `stored_sum` what the term as its dtype holds it would come to without any further
    rounding: the difference of the two is the sum's own error, the rest is the term's.
    """
    how = ACCUMULATIONS[name]
    total = torch.zeros((), dtype=getattr(torch, how.sum_dtype), device=device)
    stored = torch.tensor(term, dtype=getattr(torch, how.term_dtype), device=device)
    looked_at = checkpoints(additions)
    for count in range(1, additions + 1):
        total += stored.to(total.dtype) if how.cast else stored
        if count in looked_at:
            yield {
                "variant": name,
                "additions": count,
                "sum": float(total),
                "exact_sum": count * term,
                "stored_sum": count * float(stored),
            }


def checkpoints(last: int) -> set[int]:
    """1, 2, 5, 10, 20, 50, ... up to and including `last`."""
    decades = range(math.ceil(math.log10(last)) + 1)
    return {n for k in decades for n in (10**k, 2 * 10**k, 5 * 10**k) if n <= last} | {last}


def norm_steps(dtype: str, *, offset: float, scale: float, device: str, seed: int) -> Iterator[dict[str, Any]]:
    """A layer norm over inputs `offset + scale * normal`, (64, 768): one row a step and dtype of the arithmetic.

    The arithmetic is in `dtype` itself and, as layer norms do it, in float32 with the output rounded to `dtype`.
    `error` is the largest deviation from float64 over the largest exact value, inputs rounded to `dtype` in both;
    `own_error` the same for this step alone, given what it got. None where a result is not finite.
    `overflowed` and `underflowed` are shares of elements that this step made infinite (or NaN), or zero, and that
    float64 would not have, given the same.
    """
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(64, 768, generator=generator, dtype=torch.float64)
    inputs = (offset + scale * noise).to(getattr(torch, dtype)).to(device)
    exact = _norm_chain(inputs.cpu().double())
    for arithmetic in (dtype, "float32"):
        got = _norm_chain(inputs.to(getattr(torch, arithmetic)))
        got["output"] = got["output"].to(inputs.dtype)
        for step in NORM_STEPS:
            values = {name: value.cpu().double() for name, value in got.items()}
            alone = _NORM_STEP[step](values)
            yield {
                "arithmetic": arithmetic,
                "step": step,
                "error": _relative_error(values[step], exact[step]),
                "own_error": _relative_error(values[step], alone),
                "overflowed": _share(~values[step].isfinite() & alone.isfinite()),
                "underflowed": _share((values[step] == 0) & (alone != 0)),
            }


_NORM_STEP: Mapping[str, Callable[[Mapping[str, Tensor]], Tensor]] = {
    "mean": lambda got: got["input"].mean(dim=-1, keepdim=True),
    "centered": lambda got: got["input"] - got["mean"],
    "squares": lambda got: got["centered"] * got["centered"],
    "variance": lambda got: got["squares"].mean(dim=-1, keepdim=True),
    "rsqrt": lambda got: torch.rsqrt(got["variance"] + NORM_EPS),
    "output": lambda got: got["centered"] * got["rsqrt"],
}


def _norm_chain(inputs: Tensor) -> dict[str, Tensor]:
    """Every intermediate result, each in the dtype of `inputs`."""
    got = {"input": inputs}
    for step in NORM_STEPS:
        got[step] = _NORM_STEP[step](got)
    return got


def _relative_error(value: Tensor, exact: Tensor) -> float | None:
    largest = float(exact.abs().max())
    error = float((value - exact).abs().max())
    if not math.isfinite(error) or not math.isfinite(largest):
        return None
    return error / largest if largest else error


def _share(which: Tensor) -> float:
    return float(which.double().mean())
