"""One attention problem to measure implementations on, and the gate that each must pass before it is timed.

The gate compares with float64. At 16384 tokens that is too much for a whole problem, so that it looks at `CHECKED`
queries spread over the sequence: the gradient of the output is zero for the others, and then these queries alone,
against all keys, give all three gradients. An implementation is still run on the whole problem.

How large an error may be: `FACTOR` times that of PyTorch's math SDPA in the same dtype, on the same queries, plus one
unit of the dtype. Math SDPA computes in float32 and rounds its result once; the explicit version in half precision
rounds the scores, the scaled scores, the probabilities and the result, and again backward, where what was rounded
enters a product. A wrong mask, a tile left out or a wrong scale is off by tens of percent.

A single row among thousands is off by less than that, taken together with them. So each row, of a query or a key, is
looked at by itself, too, relative to its `_sizes`: what its terms come to if their signs are random, which is what
rounding acts on. A row that is missing is off by about all of it. Outputs of queries that are not looked at in float64
are held against explicit attention in float32, gradients of these queries must be zero.
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
TENSORS = ("output", "gradient of q", "gradient of k", "gradient of v")
FACTOR = 4.0
# Of a row: the worst of thousands is further out than all together are. A row that is missing is off by 0.3 and more.
ROW_FACTOR, ROW_UNITS = 8.0, 8.0
ROUGH = 32.0  # units of the dtype, at least of float32, for a row that is rounded here and there
ROWS_AT_ONCE = 512


@dataclass(frozen=True)
class Checked:
    """Largest relative error (root mean square) of the output and the gradients of q, k, v; and how large it may be."""

    error: float
    limit: float
    row_error: float
    """Of the worst single row, relative to its size; infinite, like `error`, where there is no number."""
    row_limit: float
    where: str = ""
    """The worst row, and its worst element: "output, sequence 0, row 5, element 3: expected 0.12, got 0.34"."""

    @property
    def is_right(self) -> bool:
        return self.error <= self.limit and self.row_error <= self.row_limit


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

    @cached_property
    def rough_output(self) -> tuple[Tensor, Tensor]:
        """Explicit attention in float32, (sequences, queries, head_dim), and sizes of its rows (`_sizes`)."""
        outputs, sizes = [], []
        for q, k, v in zip(*(x.detach().reshape(-1, *x.shape[-2:]).float() for x in self.inputs), strict=True):
            for rows in torch.arange(len(q), device=q.device).split(ROWS_AT_ONCE):
                probabilities = _probabilities(q[rows], k, rows, self.causal)
                outputs.append(probabilities @ v)
                sizes.append((probabilities.square() @ v.square().sum(-1)).sqrt())
        return torch.cat(outputs).view(-1, *self.shape[-2:]), torch.cat(sizes).view(-1, self.shape[-2])


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
    worst_rows = torch.zeros(2)  # error, math SDPA's error
    flat = [x.detach().reshape(-1, *x.shape[-2:]) for x in (*problem.inputs, problem.grad_output, *found)]
    if unlike := [str(tuple(x.shape)) for x in found if x.shape != problem.q.shape]:
        return Checked(math.inf, 0.0, math.inf, 0.0, f"expected the shape {tuple(problem.q.shape)}, got {unlike[0]}")
    if where := _wrong_in_others(problem, flat[4:], rows):
        return Checked(math.inf, 0.0, math.inf, 0.0, where)
    for sequence, (q, k, v, grad, *ours) in enumerate(zip(*flat, strict=True)):
        inputs = [q[rows], k, v, grad[rows]]
        exact_inputs = [x.double() for x in inputs]
        truth = _oracle(exact_inputs, rows, problem.causal)
        sizes = _sizes(exact_inputs, rows, problem.causal)
        math_sdpa = _math_sdpa(inputs, rows, problem.causal)
        ours[:2] = [x[rows] for x in ours[:2]]  # output and gradient of q
        for index, mine in enumerate(ours):
            exact, size = truth[index], sizes[index].clamp_min(torch.finfo(torch.float64).tiny)
            errors = [x.double() - exact for x in (mine, math_sdpa[index])]
            sums[:, index] += torch.tensor([float(x.square().sum()) for x in (*errors, exact)], dtype=torch.float64)
            of_rows = torch.stack([(error.norm(dim=-1) / size).max() for error in errors])
            if of_rows[0] > worst_rows[0]:
                row = int((errors[0].norm(dim=-1) / size).argmax())
                where = _place(index, sequence, int(rows[row]) if index < 2 else row, mine[row], exact[row])
            worst_rows = torch.maximum(worst_rows, of_rows.float().cpu())
    error, yardstick = (float((sums[i] / sums[2]).sqrt().max()) for i in (0, 1))
    unit = torch.finfo(problem.q.dtype).eps
    row_error, row_yardstick = worst_rows.tolist()
    return Checked(
        error=math.inf if math.isnan(error) else error,
        limit=FACTOR * yardstick + unit,
        row_error=row_error,
        row_limit=ROW_FACTOR * row_yardstick + ROW_UNITS * unit,
        where=where,
    )


def _place(index: int, sequence: int, row: int, mine: Tensor, exact: Tensor) -> str:
    """Where the element of a row is that is furthest off, what was expected there, and what is."""
    element = int((mine.double() - exact.double()).abs().argmax())
    expected, got = float(exact[element]), float(mine[element])
    return (
        f"{TENSORS[index]}, sequence {sequence}, row {row}, element {element}: expected {expected:.4g}, got {got:.4g}"
    )


def _wrong_in_others(problem: AttentionProblem, ours: list[Tensor], rows: Tensor) -> str:
    """Where there is no finite number, or queries beside `rows` have a gradient or not about the output they should."""
    for name, tensor in zip(TENSORS, ours, strict=False):
        if len(places := (~tensor.isfinite()).nonzero()):
            sequence, row, element = places[0].tolist()
            got = float(tensor[sequence, row, element])
            return f"{name}, sequence {sequence}, row {row}, element {element}: expected a finite number, got {got:g}"
    others = torch.ones(problem.shape[-2], dtype=torch.bool, device=rows.device)
    others[rows] = False
    if not others.any():
        return ""
    if len(ours) > 1 and bool((ours[1][:, others] != 0).any()):
        return f"{TENSORS[1]}: expected zeros for queries whose output has a gradient of zero"
    expected, sizes = problem.rough_output
    limit = ROUGH * max(torch.finfo(problem.q.dtype).eps, torch.finfo(torch.float32).eps)
    off = (ours[0].float() - expected).norm(dim=-1)
    places = (~(off <= limit * sizes) & others).nonzero()
    if not len(places):
        return ""
    sequence, row = places[0].tolist()
    return _place(0, sequence, row, ours[0][sequence, row], expected[sequence, row])


def _probabilities(q: Tensor, k: Tensor, rows: Tensor, causal: bool) -> Tensor:
    """Softmax of the queries at `rows` over all keys, in the dtype given."""
    scores = (q @ k.transpose(-2, -1)) * softmax_scale(q)
    if causal:
        scores = scores.masked_fill(~_seen(rows, k), -math.inf)
    return torch.softmax(scores, dim=-1)


def _oracle(tensors: list[Tensor], rows: Tensor, causal: bool) -> list[Tensor]:
    """Explicit attention of the queries at `rows` in the dtype given: output and gradients."""
    q, k, v = (x.detach().requires_grad_() for x in tensors[:3])
    output = _probabilities(q, k, rows, causal) @ v
    return [output.detach(), *torch.autograd.grad(output, (q, k, v), tensors[3])]


def _sizes(tensors: list[Tensor], rows: Tensor, causal: bool) -> list[Tensor]:
    """Of each row of the output and the gradients of q, k, v: the root of the sum of its terms' squares, (rows,)."""
    q, k, v, grad = tensors
    squares = [x.square().sum(-1) for x in tensors]
    probabilities = _probabilities(q, k, rows, causal)
    by_value = grad @ v.transpose(-2, -1)
    delta = (probabilities * by_value).sum(-1, keepdim=True)
    # of the gradient of the scores, the terms of which nearly cancel in some places
    of_scores = (probabilities * (by_value.abs() + delta.abs()) * softmax_scale(q)).square()
    weights = probabilities.square()
    terms = (weights @ squares[2], of_scores @ squares[1], of_scores.T @ squares[0], weights.T @ squares[3])
    return [x.sqrt() for x in terms]


def _math_sdpa(tensors: list[Tensor], rows: Tensor, causal: bool) -> list[Tensor]:
    q, k, v = (x.detach()[None, None].requires_grad_() for x in tensors[:3])
    with sdpa_kernel(SDPBackend.MATH):
        output = scaled_dot_product_attention(q, k, v, attn_mask=_seen(rows, k) if causal else None)
    gradients = torch.autograd.grad(output, (q, k, v), tensors[3][None, None])
    return [x[0, 0] for x in (output.detach(), *gradients)]


def _seen(rows: Tensor, k: Tensor) -> Tensor:
    """(rows, keys): which keys the queries at these places see."""
    return torch.arange(k.shape[-2], device=k.device) <= rows[:, None]
