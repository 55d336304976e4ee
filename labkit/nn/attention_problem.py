"""An attention problem, and the check that an implementation must pass to be timed.

The check compares output and gradients with float64. An error may be `FACTOR` times that of
PyTorch's math SDPA in the same dtype, plus one unit of the dtype. A wrong mask, a missing tile or a
wrong scale is off by tens of percent.

A single row among thousands changes that little. So each row, of a query or a key, is also compared
by itself, relative to a sum of its terms with random signs, which is what rounding acts on. A
missing row is off by about all of it.

All heads are compared, but for GPUs with few units for float64, and long sequences.
"""

import math
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from labkit.nn.attention import Attention, softmax_scale

TENSORS = ("output", "gradient of q", "gradient of k", "gradient of v")
FACTOR = 4.0
# Per row: the worst of thousands is further out than all together are. A missing row is off by 0.3
# and more.
ROW_FACTOR = 8.0
ROW_UNITS = 8.0
ROWS_AT_ONCE = 512
# Compute capabilities that multiply float64 at half the rate of float32. Others take 1/64.
FLOAT64_GPUS = ((7, 0), (8, 0), (9, 0), (10, 0))
# About a second on the others. The reference of all heads would take longer than what it checks.
MAX_REFERENCE_FLOP = 4e11


def reference_flop(sequence: int, head_dim: int) -> float:
    """Return the arithmetic in float64 of a head's reference: eight matmuls."""
    return 16.0 * sequence**2 * head_dim


def affordable_heads(n_heads: int, sequence: int, head_dim: int) -> int:
    """Return how many heads, one at least, are compared where float64 is slow."""
    return min(n_heads, max(1, int(MAX_REFERENCE_FLOP / reference_flop(sequence, head_dim))))


class AttentionProblem:
    """Inputs q, k, v and the gradient of the output, normal, from a seed.

    Each has `shape` = (..., sequence, head_dim).
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: str,
        *,
        causal: bool,
        seed: int = 0,
    ):
        # Drawn on the CPU, so that a seed gives the same numbers on every device.
        generator = torch.Generator().manual_seed(seed)
        tensors = [torch.randn(shape, generator=generator).to(device, dtype) for _ in range(4)]
        self.q, self.k, self.v = (x.requires_grad_() for x in tensors[:3])
        self.inputs = self.q, self.k, self.v
        self.grad_output = tensors[3]
        self.causal = causal

    @cached_property
    def reference(self) -> "Reference":
        """Expected results, computed at the first use."""
        return Reference(self)


class Passes:
    """Forward and backward of one implementation on a problem, as two steps that can be timed.

    A backward pass frees what its forward pass saved: alternatives in turn never hold two graphs.
    """

    def __init__(self, problem: AttentionProblem, attend: Attention):
        self._problem = problem
        self._attend = attend
        self._output: Tensor | None = None

    def forward(self) -> Tensor:
        """Return the output, (..., sequence, head_dim)."""
        self._output = self._attend(*self._problem.inputs, self._problem.causal)
        return self._output

    def backward(self) -> tuple[Tensor, ...]:
        """Return the gradients of q, k and v, after a forward pass."""
        # Taken out first, so that the graph is freed when this pass ends.
        output = self._output
        self._output = None
        assert output is not None
        return torch.autograd.grad(output, self._problem.inputs, self._problem.grad_output)

    def release(self) -> None:
        """Drop a forward pass that no backward pass will follow."""
        self._output = None

    def run_checked(self) -> list[Tensor]:
        """Return output and gradients of q, k, v, for `check`."""
        return [self.forward().detach(), *self.backward()]


class Reference:
    """Output and gradients in float64, (heads, rows, head_dim), with limits and sizes of rows.

    `heads` are those of the problem that are compared.
    """

    def __init__(self, problem: AttentionProblem):
        self.heads = _heads_to_compare(problem)
        # Output and gradients have the same shapes.
        tensors = [self._select(x) for x in (*problem.inputs, problem.grad_output)]
        self.results = [torch.zeros_like(x, dtype=torch.float64) for x in tensors]
        # torch's results in the dtype of the problem: their errors are what rounding may do.
        rounded = [torch.zeros_like(x, dtype=torch.float64) for x in tensors]
        squares = [x[..., 0].clone() for x in self.results]
        for sequence, (q, k, v, grad) in enumerate(zip(*tensors, strict=True)):
            # In parts: the float64 scores of a long sequence would not fit in memory.
            for rows in torch.arange(len(q), device=q.device).split(ROWS_AT_ONCE):
                part = [q[rows], k, v, grad[rows]]
                exact = [x.double() for x in part]
                mask = None
                if problem.causal:
                    mask = torch.arange(len(k), device=q.device) <= rows[:, None]
                _add_part(self.results, sequence, rows, _attend(exact, mask))
                _add_part(rounded, sequence, rows, _attend(part, mask))
                _add_part(squares, sequence, rows, _squares(exact, mask))
        # A row without terms, as of a key that no query sees, must not divide by zero.
        self._sizes = [x.sqrt().clamp_min(torch.finfo(x.dtype).tiny) for x in squares]
        unit = torch.finfo(problem.q.dtype).eps
        error, row_error, _ = self._errors(rounded)
        self.limit = FACTOR * error + unit
        self.row_limit = ROW_FACTOR * row_error + ROW_UNITS * unit

    def _select(self, tensor: Tensor) -> Tensor:
        return tensor.detach().reshape(-1, *tensor.shape[-2:])[self.heads]

    def compare(self, results: list[Tensor]) -> tuple[float, float, str]:
        """Return the error of all rows, of the worst row, and the place of its worst element."""
        return self._errors([self._select(result) for result in results])

    def _errors(self, results: list[Tensor]) -> tuple[float, float, str]:
        error = 0.0
        row_error = 0.0
        where = ""
        for name, result, exact, sizes in zip(
            TENSORS, results, self.results, self._sizes, strict=False
        ):
            got = result.double()
            difference = got - exact
            error = max(error, float((difference.norm() / exact.norm()).nan_to_num(math.inf)))
            by_row = (difference.norm(dim=-1) / sizes).nan_to_num(math.inf, posinf=math.inf)
            if float(by_row.max()) > row_error:
                row_error = float(by_row.max())
                index, row = divmod(int(by_row.argmax()), by_row.shape[-1])
                element = int(difference[index, row].abs().nan_to_num(math.inf).argmax())
                place = index, row, element
                head = int(self.heads[index])
                where = f"{name}, sequence {head}, row {row}, element {element}: "
                where += f"expected {float(exact[place]):.4g}, got {float(got[place]):.4g}"
        return error, row_error, where


def _add_part(
    totals: list[Tensor], sequence: int, rows: Tensor, terms: tuple[Tensor, ...] | list[Tensor]
) -> None:
    """Add what queries in these rows contribute to a sequence of each of the `TENSORS`."""
    output, grad_q, grad_k, grad_v = totals
    output[sequence, rows] += terms[0]
    grad_q[sequence, rows] += terms[1]
    # All rows of keys and values: of keys that a causal query does not see, the terms are zero.
    grad_k[sequence] += terms[2]
    grad_v[sequence] += terms[3]


def _heads_to_compare(problem: AttentionProblem) -> Tensor:
    """Return indices of heads: all, or as many as are compared in a few seconds."""
    sequence, head_dim = problem.q.shape[-2:]
    n_heads = math.prod(problem.q.shape[:-2])
    count = n_heads
    if problem.q.is_cuda and torch.cuda.get_device_capability(problem.q.device) not in FLOAT64_GPUS:
        count = affordable_heads(n_heads, sequence, head_dim)
    # From the last, whose elements are furthest from the beginning: offsets overflow there.
    return torch.linspace(n_heads - 1, 0, count, dtype=torch.float64).round().long()


def check(problem: AttentionProblem, results: list[Tensor]) -> tuple[float, str | None]:
    """Compare the results of `Passes.run_checked`, or the output, with the reference.

    Return the largest relative error (root mean square; infinite for NaN) of a tensor, and None or
    the worst element: "output, sequence 0, row 5, element 3: expected 0.12, got 0.34".
    """
    for result in results:
        if result.shape != problem.q.shape:
            expected = tuple(problem.q.shape)
            return math.inf, f"expected the shape {expected}, got {tuple(result.shape)}"
    reference = problem.reference
    error, row_error, where = reference.compare(results)
    is_right = error <= reference.limit and row_error <= reference.row_limit
    return error, None if is_right else where


def _attend(tensors: list[Tensor], mask: Tensor | None) -> list[Tensor]:
    """Return output and gradients by unfused attention in the inputs' dtype."""
    q, k, v = (x.detach()[None, None].requires_grad_() for x in tensors[:3])
    with sdpa_kernel(SDPBackend.MATH):
        output = scaled_dot_product_attention(q, k, v, attn_mask=mask)
    gradients = torch.autograd.grad(output, (q, k, v), tensors[3][None, None])
    return [x[0, 0] for x in (output.detach(), *gradients)]


def _squares(tensors: list[Tensor], mask: Tensor | None) -> list[Tensor]:
    """Return sums of squared terms of each row of output and gradients of q, k, v, (rows,)."""
    # Their root is the size of a sum of the terms with random signs.
    q, k, v, grad = tensors
    scores = (q @ k.T) * softmax_scale(q)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    probabilities = torch.softmax(scores, dim=-1)
    by_value = grad @ v.T
    delta = (probabilities * by_value).sum(-1, keepdim=True)
    # Absolute values: the two terms of a score's gradient nearly cancel in some places, and their
    # rounding does not.
    by_score = (probabilities * (by_value.abs() + delta.abs()) * softmax_scale(q)).square()
    weights = probabilities.square()
    q2, k2, v2, grad2 = (x.square().sum(-1) for x in tensors)
    return [weights @ v2, by_score @ k2, by_score.T @ q2, weights.T @ grad2]
