"""One attention problem to measure implementations on, and the gate that each must pass before it is timed.

The gate compares with float64. At 16384 tokens that is too much for a whole problem, so that it looks at `CHECKED`
queries spread over the sequence: the gradient of the output is zero for the others, and then these queries alone,
against all keys, give all three gradients. An implementation is still run on the whole problem.

How large an error may be: `FACTOR` times that of PyTorch's math SDPA in the same dtype, on the same queries, plus one
unit of the dtype. Math SDPA computes in float32 and rounds its result once; the explicit version in half precision
rounds the scores, the scaled scores, the probabilities and the result, and again backward, where what was rounded
enters a product. A wrong mask, a tile left out or a wrong scale is off by tens of percent.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from labkit.nn.attention import Attention, softmax_scale

CHECKED = 256
FACTOR = 4.0


@dataclass(frozen=True)
class Checked:
    """Largest relative error (root mean square) of the output and the gradients of q, k, v; and how large it may be."""

    error: float
    limit: float


class AttentionProblem:
    """q, k, v and the gradient of the output, each `shape` = (..., sequence, head_dim), normal, from a seed."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: str, *, causal: bool, seed: int = 0):
        generator = torch.Generator().manual_seed(seed)
        tensors = [torch.randn(shape, generator=generator).to(device, dtype) for _ in range(4)]
        self.q, self.k, self.v = (x.requires_grad_() for x in tensors[:3])
        self.grad_output = tensors[3]
        self.causal = causal
        self.shape = shape

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v

    def passes(self, attend: Attention) -> "Passes":
        """Forward and backward of an implementation on these tensors."""
        return Passes(self, attend)

    def checked_rows(self) -> Tensor:
        """Queries that the gate looks at: all of a short sequence, else spread from the first to the last."""
        sequence = self.q.shape[-2]
        spread = torch.linspace(0, sequence - 1, min(sequence, CHECKED), dtype=torch.float64)
        return spread.round().long().to(self.q.device)

    @cached_property
    def checked_gradient(self) -> Tensor:
        """The gradient of the output, zero except for the queries that are checked."""
        rows, gradient = self.checked_rows(), torch.zeros_like(self.grad_output)
        gradient[..., rows, :] = self.grad_output[..., rows, :]
        return gradient


class Passes:
    """The two passes of one implementation, one by one, so that each can be timed.

    A backward pass frees what its forward pass saved, so that alternatives taking turns never hold two graphs.
    """

    def __init__(self, problem: AttentionProblem, attend: Attention):
        self._problem = problem
        self._attend = attend
        self._output: Tensor | None = None

    def forward(self) -> Tensor:
        """The output, (..., sequence, head_dim)."""
        self._output = self._attend(*self._problem.inputs, self._problem.causal)
        return self._output

    def backward(self) -> tuple[Tensor, ...]:
        """Gradients of q, k and v."""
        assert self._output is not None, "a backward pass follows its forward pass"
        output, self._output = self._output, None
        return torch.autograd.grad(output, self._problem.inputs, self._problem.grad_output)

    def release(self) -> None:
        """Let go of a forward pass that no backward pass will follow."""
        self._output = None

    def run_checked(self) -> list[Tensor]:
        """Output and gradients of q, k, v for the gate; the whole problem, the gradient of the checked queries."""
        output = self._attend(*self._problem.inputs, self._problem.causal)
        gradients = torch.autograd.grad(output, self._problem.inputs, self._problem.checked_gradient)
        return [output.detach(), *gradients]


def check(problem: AttentionProblem, found: list[Tensor]) -> Checked:
    """Compare with float64 what `Passes.run_checked` returned, or the output alone; one sequence after another."""
    rows = problem.checked_rows()
    sums = torch.zeros(3, len(found), dtype=torch.float64)  # squares of: error, math SDPA's error, truth
    flat = [x.detach().reshape(-1, *x.shape[-2:]) for x in (*problem.inputs, problem.grad_output, *found)]
    for q, k, v, grad, *ours in zip(*flat, strict=True):
        inputs = [q[rows], k, v, grad[rows]]
        truth = _oracle([x.double() for x in inputs], rows, problem.causal)
        math_sdpa = _math_sdpa(inputs, rows, problem.causal)
        ours[:2] = [x[rows] for x in ours[:2]]  # output and gradient of q
        for index, (mine, theirs, exact) in enumerate(zip(ours, math_sdpa, truth, strict=False)):
            squares = [mine.double() - exact, theirs.double() - exact, exact]
            sums[:, index] += torch.tensor([float(x.square().sum()) for x in squares], dtype=torch.float64)
    error, yardstick = (float((sums[i] / sums[2]).sqrt().max()) for i in (0, 1))
    limit = FACTOR * yardstick + torch.finfo(problem.q.dtype).eps
    return Checked(math.inf if math.isnan(error) else error, limit)


def _oracle(tensors: list[Tensor], rows: Tensor, causal: bool) -> list[Tensor]:
    """Explicit attention of the queries at `rows` in the dtype given: output and gradients."""
    q, k, v = (x.detach().requires_grad_() for x in tensors[:3])
    scores = (q @ k.transpose(-2, -1)) * softmax_scale(q)
    if causal:
        scores = scores.masked_fill(~_seen(rows, k), -math.inf)
    output = torch.softmax(scores, dim=-1) @ v
    return [output.detach(), *torch.autograd.grad(output, (q, k, v), tensors[3])]


def _math_sdpa(tensors: list[Tensor], rows: Tensor, causal: bool) -> list[Tensor]:
    q, k, v = (x.detach()[None, None].requires_grad_() for x in tensors[:3])
    with sdpa_kernel(SDPBackend.MATH):
        output = scaled_dot_product_attention(q, k, v, attn_mask=_seen(rows, k) if causal else None)
    gradients = torch.autograd.grad(output, (q, k, v), tensors[3][None, None])
    return [x[0, 0] for x in (output.detach(), *gradients)]


def _seen(rows: Tensor, k: Tensor) -> Tensor:
    """(rows, keys): which keys the queries at these places see."""
    return torch.arange(k.shape[-2], device=k.device) <= rows[:, None]
