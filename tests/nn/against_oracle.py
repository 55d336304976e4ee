"""The bar for every implementation of attention: the float64 oracle, with torch's math SDPA as the
yardstick.

Why an error may be twice that of math SDPA: that one computes in float32 and rounds each result
once. A fast kernel in half precision also rounds the probabilities and dS, operands of a matmul,
and keeps the output rounded, which enters delta. Three independent roundings instead of one are
sqrt(3) in the root mean square.

The floors. `ULPS_FLOAT32` units of float32 at the size of the terms: with a single key math SDPA's
gradient is exactly zero, ours a difference of two sums, of as many terms as there are queries per
key. And an eighth of a unit of the dtype at the size of the result: in the first rows of causal
attention few keys are averaged, and the roundings are not many and independent.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from labkit.nn.attention import masked_scores, naive_attention

Attend = Callable[..., Tensor]
"""(q, k, v, causal, scale) -> output."""

FACTOR = 2.0
ULPS_FLOAT32 = 4
LARGEST_FACTOR = 4.0
"""For the largest error of any element; it is a sum of roundings where math SDPA has one."""


@dataclass(frozen=True)
class Case:
    """One problem: q (*leading, group, queries, head_dim), k and v (*leading, 1, keys, head_dim);
    no group of 1."""

    queries: int
    keys: int
    head_dim: int
    causal: bool
    dtype: torch.dtype = torch.float32
    leading: tuple[int, ...] = (2,)
    contiguous: bool = True
    group: int = 1
    scale: float | None = None

    def __str__(self) -> str:
        parts = [
            f"{self.queries}x{self.keys}",
            f"d{self.head_dim}",
            "causal" if self.causal else "full",
        ]
        parts += [
            str(self.dtype).removeprefix("torch."),
            f"{len(self.leading) + 2}D",
            f"group{self.group}",
        ]
        return "-".join(
            parts
            + ([] if self.contiguous else ["strided"])
            + ([] if self.scale is None else ["scaled"])
        )

    def tensors(self, device: str) -> list[Tensor]:
        """q, k, v and the gradient of the output: normal, the same on every device."""
        generator = torch.Generator().manual_seed(0)
        sizes = [
            (self.queries, self.group),
            (self.keys, 1),
            (self.keys, 1),
            (self.queries, self.group),
        ]
        return [self._tensor(length, group, generator).to(device) for length, group in sizes]

    def _tensor(self, length: int, group: int, generator: torch.Generator) -> Tensor:
        leading = (*self.leading, group) if self.group > 1 else self.leading
        values = torch.randn(*leading, length, self.head_dim, generator=generator).to(self.dtype)
        if self.contiguous:
            return values
        # a slice in the middle of a larger tensor, with the sequence not next to last in memory
        larger = torch.full((length + 2, *leading, self.head_dim + 4), math.nan, dtype=self.dtype)
        inside = larger[1:-1, ..., 2:-2].movedim(0, -2)
        inside.copy_(values)
        return inside


def check_against_oracle(
    attend: Attend, forward: Callable[..., tuple[Tensor, Tensor]], case: Case, device: str
) -> None:
    """Assert that output, logsumexp and the three gradients are as near to float64 as the module
    says."""
    q, k, v, grad = case.tensors(device)
    exact = _run(naive, [x.double() for x in (q, k, v, grad)], case)
    yardstick = _run(_math_sdpa, [q, k, v, grad], case)
    with poisoned_memory():
        ours = _run(attend, [q, k, v, grad], case)
        logsumexp = forward(q, k, v, case.causal, scale=case.scale)[1]

    for name, mine, theirs, truth in zip(
        ("output", "dQ", "dK", "dV"), ours, yardstick, exact, strict=True
    ):
        assert mine.dtype == case.dtype, name
        assert mine.shape == truth.shape, name
        terms = math.sqrt(max(1.0, case.group * case.queries / case.keys))
        _assert_near(
            name, mine, theirs, truth, ULPS_FLOAT32 * torch.finfo(torch.float32).eps * terms
        )

    truth = torch.logsumexp(masked_scores(q.double(), k.double(), case.causal, case.scale), dim=-1)
    assert logsumexp.shape == q.shape[:-1]
    assert logsumexp.dtype == torch.float32
    # scores of size sqrt(D) at most, summed and rounded in float32 a few times
    torch.testing.assert_close(logsumexp.double(), truth, rtol=0, atol=1.2e-5)


def naive(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> Tensor:
    return naive_attention(q, k, v, causal, scale=scale)


def _math_sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> Tensor:
    q4, k4, v4 = (x.reshape(1, -1, *x.shape[-2:]) for x in (q, k, v))
    with sdpa_kernel(SDPBackend.MATH):
        output = scaled_dot_product_attention(
            q4, k4, v4, is_causal=causal, scale=scale, enable_gqa=True
        )
    return output.reshape(q.shape)


def _run(attend: Attend, tensors: list[Tensor], case: Case) -> tuple[Tensor, ...]:
    # detached, not cloned: strides stay
    q, k, v = (x.detach().requires_grad_() for x in tensors[:3])
    output = attend(q, k, v, case.causal, case.scale)
    return output.detach(), *torch.autograd.grad(output, (q, k, v), tensors[3])


def _assert_near(name: str, mine: Tensor, theirs: Tensor, truth: Tensor, floor: float) -> None:
    mine_error = mine.double() - truth
    their_error = theirs.double() - truth
    floor += torch.finfo(mine.dtype).eps / 8 * _rms(truth)
    limit = FACTOR * _rms(their_error) + floor
    assert _rms(mine_error) <= limit, (
        f"{name}: error {_rms(mine_error):.2e}, math SDPA {_rms(their_error):.2e}"
    )
    largest = float(mine_error.abs().max())
    their_largest = float(their_error.abs().max())
    limit = LARGEST_FACTOR * (their_largest + floor)
    assert largest <= limit, f"{name}: largest error {largest:.2e}, math SDPA {their_largest:.2e}"


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """`torch.empty` gives NaN: whatever is read before it is written shows."""
    before = (
        torch.get_deterministic_debug_mode(),
        torch.utils.deterministic.fill_uninitialized_memory,
    )
    # without the compiler, which takes a second to import
    torch.set_deterministic_debug_mode("error")
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]


def assert_saves_one_logsumexp(attend: Attend, device: str, dtype: torch.dtype) -> None:
    """q, k, v, the output and exactly one float32 number per query are kept for the backward pass,
    nothing else."""
    q, k, v = (
        torch.randn(2, 3, 50, 32, device=device, dtype=dtype, requires_grad=True) for _ in range(3)
    )
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        output = attend(q, k, v, True)
    shapes = sorted((tuple(x.shape), x.dtype) for x in saved)
    assert shapes == sorted(
        [((2, 3, 50), torch.float32), *[((2, 3, 50, 32), dtype)] * 4], key=lambda x: x[0]
    )
    assert {x.data_ptr() for x in (q, k, v, output)} < {x.data_ptr() for x in saved}, "no copies"


def assert_output_may_change(attend: Attend, device: str) -> None:
    """Gradients are right if the output is changed in place, also through views."""
    inputs = [torch.randn(heads, 40, 16, device=device, requires_grad=True) for heads in (2, 1, 1)]
    results = []
    for one in (attend, naive):
        output = one(*inputs, True, None).mul_(2)
        output.transpose(1, 2).add_(1)
        output.view(-1)[5:].relu_()
        results.append(torch.autograd.grad(output.square().sum(), inputs))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
