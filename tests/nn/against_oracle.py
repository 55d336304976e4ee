"""What every implementation of attention is held to: the float64 oracle, with torch's math SDPA as the yardstick.

Why an error may be twice that of math SDPA: that one computes in float32 and rounds each result once.  A fast kernel in
half precision also rounds the probabilities and dS, operands of a product, and keeps the output rounded, which enters
delta.  Three independent roundings instead of one are sqrt(3) in the root mean square.

The floors.  `ULPS_FLOAT32` units of float32 at the size of the terms: with a single key math SDPA's gradient is exactly
zero, ours a difference of two sums, as many as there are queries to a key.  And an eighth of a unit of the dtype at the
size of the result: in the first rows of causal attention few keys are averaged, and the roundings are not many and
independent.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from labkit.nn.attention import explicit_attention, masked_scores
from labkit.nn.attention_implementations import IMPLEMENTATIONS

Attention = Callable[[Tensor, Tensor, Tensor, bool], Tensor]
Forward = Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]

FACTOR = 2.0
ULPS_FLOAT32 = 4
LARGEST_FACTOR = 4.0
"""For the largest error of any element; it is a sum of roundings where math SDPA has one."""


@dataclass(frozen=True)
class Case:
    """One problem: q (*leading, queries, head_dim), k and v (*leading, keys, head_dim)."""

    queries: int
    keys: int
    head_dim: int
    causal: bool
    dtype: torch.dtype = torch.float32
    leading: tuple[int, ...] = (2,)
    contiguous: bool = True

    def __str__(self) -> str:
        parts = [f"{self.queries}x{self.keys}", f"d{self.head_dim}", "causal" if self.causal else "full"]
        parts += [str(self.dtype).removeprefix("torch."), f"{len(self.leading) + 2}D"]
        return "-".join(parts + ([] if self.contiguous else ["strided"]))

    def tensors(self, device: str) -> list[Tensor]:
        """q, k, v and the gradient of the output: normal, the same on every device."""
        generator = torch.Generator().manual_seed(0)
        lengths = (self.queries, self.keys, self.keys, self.queries)
        return [self._tensor(length, generator).to(device) for length in lengths]

    def _tensor(self, length: int, generator: torch.Generator) -> Tensor:
        values = torch.randn(*self.leading, length, self.head_dim, generator=generator).to(self.dtype)
        if self.contiguous:
            return values
        # a slice in the middle of a larger tensor, with the sequence not next to last in memory
        larger = torch.full((length + 2, *self.leading, self.head_dim + 4), math.nan, dtype=self.dtype)
        inside = larger[1:-1, ..., 2:-2].movedim(0, -2)
        inside.copy_(values)
        return inside


def check_against_oracle(attend: Attention, forward: Forward, case: Case, device: str) -> None:
    """Assert that output, logsumexp and the three gradients are as near to float64 as the module says."""
    q, k, v, grad = case.tensors(device)
    exact = _run(explicit_attention, [x.double() for x in (q, k, v, grad)], case.causal)
    yardstick = _run(IMPLEMENTATIONS["sdpa_math"].attend, [q, k, v, grad], case.causal)
    with poisoned_memory():
        ours = _run(attend, [q, k, v, grad], case.causal)
        logsumexp = forward(q, k, v, case.causal)[1]

    for name, mine, theirs, truth in zip(("output", "dQ", "dK", "dV"), ours, yardstick, exact, strict=True):
        assert mine.dtype == case.dtype, name
        assert mine.shape == truth.shape, name
        terms = math.sqrt(max(1.0, case.queries / case.keys))
        _assert_near(name, mine, theirs, truth, ULPS_FLOAT32 * torch.finfo(torch.float32).eps * terms)

    truth = torch.logsumexp(masked_scores(q.double(), k.double(), case.causal), dim=-1)
    assert logsumexp.shape == q.shape[:-1]
    assert logsumexp.dtype == torch.float32
    # scores of size sqrt(D) at most, summed and rounded in float32 a few times
    torch.testing.assert_close(logsumexp.double(), truth, rtol=0, atol=8e-6)


def _run(attend: Attention, tensors: list[Tensor], causal: bool) -> tuple[Tensor, ...]:
    # detached, not cloned: strides stay
    q, k, v = (x.detach().requires_grad_() for x in tensors[:3])
    output = attend(q, k, v, causal)
    return output.detach(), *torch.autograd.grad(output, (q, k, v), tensors[3])


def _assert_near(name: str, mine: Tensor, theirs: Tensor, truth: Tensor, floor: float) -> None:
    mine_error, their_error = mine.double() - truth, theirs.double() - truth
    floor += torch.finfo(mine.dtype).eps / 8 * _rms(truth)
    limit = FACTOR * _rms(their_error) + floor
    assert _rms(mine_error) <= limit, f"{name}: error {_rms(mine_error):.2e}, math SDPA {_rms(their_error):.2e}"
    largest, their_largest = float(mine_error.abs().max()), float(their_error.abs().max())
    limit = LARGEST_FACTOR * (their_largest + floor)
    assert largest <= limit, f"{name}: largest error {largest:.2e}, math SDPA {their_largest:.2e}"


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """`torch.empty` gives NaN: whatever is read before it is written shows."""
    before = torch.get_deterministic_debug_mode(), torch.utils.deterministic.fill_uninitialized_memory
    torch.set_deterministic_debug_mode("error")  # without the compiler, which takes a second to import
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]


def assert_saves_one_logsumexp(attend: Attention, device: str, dtype: torch.dtype) -> None:
    """q, k, v, the output and exactly one float32 number a query are kept for the backward pass, nothing else."""
    q, k, v = (torch.randn(2, 3, 50, 32, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        attend(q, k, v, True)
    shapes = sorted((tuple(x.shape), x.dtype) for x in saved)
    assert shapes == sorted([((2, 3, 50), torch.float32), *[((2, 3, 50, 32), dtype)] * 4], key=lambda x: x[0])


BAD_INPUTS = {
    "one dimension": ([8], [8], [8], "expected q"),
    "k and v differ": ([2, 8, 16], [2, 9, 16], [2, 8, 16], "k and v of one shape"),
    "leading dimensions differ": ([2, 8, 16], [3, 8, 16], [3, 8, 16], "equal leading dimensions"),
    "number of dimensions differs": ([8, 16], [1, 8, 16], [1, 8, 16], "equal leading dimensions"),
    "head dims differ": ([2, 8, 16], [2, 8, 32], [2, 8, 32], "one head_dim"),
    "no queries": ([2, 0, 16], [2, 8, 16], [2, 8, 16], "no dimension empty"),
}
"""Shapes of q, k and v that do not fit, and what the error must say is expected."""
