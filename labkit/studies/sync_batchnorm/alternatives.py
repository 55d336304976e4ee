"""What takes turns in the SyncBatchNorm lab: layers on one batch, bare collectives of the same bytes, and the gate.

The batch is that of all ranks together; each rank has its rows of it. The loss is the sum of the outputs of the first
half of the batch, so that some ranks have a gradient of ones and others of zeros: backward begins with that gradient,
and computing the loss itself is no part of any time. Rows of rank r are shifted by r: statistics of one rank's rows are
far from those of the whole batch.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labkit.bench import check
from labkit.bench.checksums import first_wrong
from labkit.parallel import sync_batchnorm
from labkit.parallel.sync_batchnorm import SyncBatchNorm
from labkit.studies.shared.gradient_check import furthest
from labkit.studies.shared.norm_collectives import sent_bytes

OWN, TWO_COLLECTIVES, ALONE, TORCH = "labkit", "labkit_two_collectives", "labkit_without_collectives", "torch"
LOCAL, WHOLE = "plain_local_batch", "plain_whole_batch"
LAYERS: dict[str, Callable[[int], nn.Module]] = {
    OWN: SyncBatchNorm,
    TWO_COLLECTIVES: SyncBatchNorm,
    ALONE: SyncBatchNorm,
    TORCH: nn.SyncBatchNorm,
    LOCAL: nn.BatchNorm1d,
    WHOLE: nn.BatchNorm1d,
}
"""Features -> a layer for inputs (rows, features); a reader may add to it (`register`)."""
COLLECTIVES, ALL_REDUCES = "bare_collectives", "bare_all_reduces"
BARE = (COLLECTIVES, ALL_REDUCES)
ALTERNATIVES = (*LAYERS, *BARE)
BY_LOCAL_BATCH = (ALONE, LOCAL)

TENSORS = ("output", "gradient of the input", "gradient of weight", "gradient of bias", "running_mean", "running_var")

# Relative to the largest expected value of a channel. Float32 stays far below it; without the rows of one rank of 16 a
# mean, a variance or a sum of gradients is off by a hundredth or more in some row.
TOLERANCE = 1e-4


def register(name: str, layer: Callable[[int], nn.Module]) -> dict[str, Callable[[int], nn.Module]]:
    """Add a reader's layer: called with the number of features, it returns a module that normalizes by all ranks' rows.

    It has `weight`, `bias`, `running_mean` and `running_var`, as nn.BatchNorm1d. ValueError for a name that is taken.
    """
    if name in ALTERNATIVES:
        raise ValueError(f"expected a name other than {', '.join(ALTERNATIVES)}")
    LAYERS[name] = layer
    return LAYERS


# What labkit's layer sends through, as it is: `_sending` puts something else in its place.
_gather, _sum_over_ranks = sync_batchnorm._gather, sync_batchnorm._sum_over_ranks


def _gather_in_two(statistics: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Counts and means first, deviations after them: two collectives instead of one, the same numbers.

    Whoever takes deviations from the mean of the whole batch needs two, the first for the mean.
    """
    first = len(statistics) // 2 + 1
    return torch.cat([_gather(part, group) for part in (statistics[:first], statistics[first:])], dim=1)


def _gather_nothing(statistics: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """This rank's statistics as if there were no others."""
    return statistics.view(1, -1)


def _sum_nothing(sums: Tensor, group: dist.ProcessGroup | None) -> None:
    pass


@contextmanager
def _sending(name: str) -> Iterator[None]:
    """Inside, labkit's layer sends as the alternative does; its arithmetic stays the same."""
    if name == TWO_COLLECTIVES:
        sync_batchnorm._gather = _gather_in_two
    elif name == ALONE:
        sync_batchnorm._gather, sync_batchnorm._sum_over_ranks = _gather_nothing, _sum_nothing
    try:
        yield
    finally:
        sync_batchnorm._gather, sync_batchnorm._sum_over_ranks = _gather, _sum_over_ranks


@dataclass(frozen=True)
class Batch:
    """The input of all ranks and the gradient of its output, (batch, features) in float32; `mine`: this rank's rows."""

    whole: Tensor
    gradient: Tensor
    mine: slice

    @staticmethod
    def of_rank(batch: int, features: int, *, seed: int, device: str) -> "Batch":
        """The same whole batch on every rank, from the seed."""
        rank, ranks = dist.get_rank(), dist.get_world_size()
        generator = torch.Generator().manual_seed(seed)
        whole = torch.randn(batch, features, generator=generator)
        bounds = [batch * index // ranks for index in range(ranks + 1)]
        for index in range(ranks):
            whole[bounds[index] : bounds[index + 1]] += index
        gradient = torch.zeros(batch, features)
        gradient[: batch // 2] = 1
        return Batch(whole.to(device), gradient.to(device), slice(bounds[rank], bounds[rank + 1]))

    def rows_for(self, alternative: str) -> slice:
        """What an alternative normalizes on this rank: its own rows, or all."""
        return slice(None) if alternative == WHOLE else self.mine


class Layer:
    """A batch-norm layer, its input and its output's gradient. `forward` and `backward` are what is timed."""

    def __init__(self, name: str, batch: Batch):
        self.name = name
        rows = batch.rows_for(name)
        # the lab's input, not a view of the whole batch: what is saved by reference is this alone
        self.x = batch.whole[rows].clone().requires_grad_()
        self.gradient = batch.gradient[rows].clone()
        self.layer = _build(name, self.x.shape[1]).to(self.x.device)
        self._inputs = [self.x, *_affine(self.layer)]
        self._outputs: list[Tensor] = []

    def forward(self) -> None:
        with _sending(self.name):
            self._outputs.append(self.layer(self.x))

    def backward(self) -> None:
        """Of the last forward pass that has not had its backward."""
        self.gradients(self.gradient)

    def gradients(self, of_output: Tensor) -> tuple[Tensor, ...]:
        """Of input, weight and bias."""
        with _sending(self.name):
            return torch.autograd.grad(self._outputs.pop(), self._inputs, of_output)


def _build(name: str, features: int) -> nn.Module:
    return _with_affine(LAYERS[name](features))


def _affine(layer: nn.Module) -> list[nn.Parameter]:
    """Weight and bias, (features,) each."""
    return [layer.get_parameter(name) for name in ("weight", "bias")]


def _with_affine(layer: nn.Module) -> nn.Module:
    """Weights and biases that differ between channels, some negative; sixteenths, which every type has exactly."""
    generator = torch.Generator().manual_seed(99)
    for parameter in _affine(layer):
        values = torch.randint(-32, 32, parameter.shape, generator=generator)
        parameter.data.copy_(values / 16 + 1 / 32)
    return layer


class Bare:
    """The collectives alone, of as many numbers of the same types as the layer sends: [count, mean, M2], [S1, S2].

    `bare_collectives` runs what the layer runs, `bare_all_reduces` the backend's all-reduce both times.
    """

    def __init__(self, name: str, features: int, device: str):
        self.name = name
        self.features = features
        self.statistics = torch.zeros(2 * features + 1, dtype=torch.float64, device=device)
        self.sums = torch.zeros(2 * features, dtype=torch.float32, device=device)

    def forward(self) -> None:
        if self.name == COLLECTIVES:
            _gather(self.statistics, None)
        else:
            dist.all_reduce(self.statistics)

    def backward(self) -> None:
        if self.name == COLLECTIVES:
            _sum_over_ranks(self.sums, None)
        else:
            dist.all_reduce(self.sums)

    @property
    def sent_bytes(self) -> dict[str, int]:
        """Of a rank, by phase."""
        return dict(zip(("forward", "backward"), sent_bytes(self.features), strict=True))


def check_layer(layer: Layer, batch: Batch) -> tuple[float, str]:
    """Largest error of any rank against BatchNorm in float64, and "ok" or what is wrong and where.

    Of `TENSORS`, by channel, over the largest expected value of the channel. The gradient of the output is random here:
    of the one that is timed some ranks have nothing but zeros, and nobody would miss them.

    What normalizes by the local batch is held against that, all others against the whole batch, whose gradients of
    weight and bias are the sums over ranks. Every rank gets the same number.
    """
    gradient = torch.randn(batch.whole.shape, generator=torch.Generator().manual_seed(1)).to(batch.whole.device)
    layer.forward()
    output = layer._outputs[-1].detach()
    dx, *affine = layer.gradients(gradient[batch.rows_for(layer.name)])
    if layer.name not in (*BY_LOCAL_BATCH, WHOLE):
        for of_rank in affine:
            dist.all_reduce(of_rank)
    found = [output, dx, *affine, *_running_statistics(layer.layer)]
    exact = _exact(layer, batch, gradient)
    errors = [_largest(got, right) for got, right in zip(found, exact, strict=True)]
    error = check.max_over_ranks(max(errors))
    told = verdict(error)
    return error, told if told == "ok" else f"{told}; {_where(errors, found, exact)}"


def _where(errors: list[float], found: list[Tensor], exact: list[Tensor]) -> str:
    """ "rank 1, output, row 3, feature 5: expected 0.5, got 0.7" of the first rank that is wrong, on all ranks."""
    index = max(range(len(errors)), key=errors.__getitem__)
    own = (index, *furthest(found[index], exact[index]))
    wrong = check.first_failing_rank(own if verdict(errors[index]) != "ok" else (-1.0, 0.0, 0.0, 0.0))
    assert wrong is not None, "the largest error is some rank's"
    rank, (tensor, element, expected, got) = wrong
    row, feature = divmod(int(element), exact[0].shape[-1])
    at_row = f", row {row}" if tensor < 2 else ""
    return f"rank {rank}, {TENSORS[int(tensor)]}{at_row}, feature {feature}: expected {expected:.4g}, got {got:.4g}"


def _exact(layer: Layer, batch: Batch, gradient: Tensor) -> list[Tensor]:
    """What `check_layer` compares with, in its order."""
    rows = batch.mine if layer.name in BY_LOCAL_BATCH else slice(None)
    x = batch.whole[rows].double().requires_grad_()
    reference = _with_affine(nn.BatchNorm1d(x.shape[1], dtype=torch.float64)).to(x.device)
    output = reference(x)
    dx, *affine = torch.autograd.grad(output, [x, *reference.parameters()], gradient[rows].double())
    shown = slice(None) if layer.name in BY_LOCAL_BATCH else batch.rows_for(layer.name)
    return [output.detach()[shown], dx[shown], *affine, *_running_statistics(reference)]


def _running_statistics(layer: nn.Module) -> list[Tensor]:
    return [layer.get_buffer("running_mean"), layer.get_buffer("running_var")]


def bare_gate(bare: Bare) -> str:
    """ "ok", or what is wrong of what the bare collectives return, which whole numbers make exact."""

    def forward(statistics: Tensor) -> None:
        if bare.name == COLLECTIVES:
            statistics.copy_(_gather(statistics, None).sum(0))
        else:
            dist.all_reduce(statistics)

    def backward(sums: Tensor) -> None:
        bare.backward()

    wrong = first_wrong(forward, bare.statistics) or first_wrong(backward, bare.sums)
    bare.statistics.zero_()  # sums of sums would overflow
    bare.sums.zero_()
    return wrong or "ok"


def verdict(error: float) -> str:
    """ "ok", or what is wrong."""
    return check.verdict(error, TOLERANCE)


def _largest(got: Tensor, exact: Tensor) -> float:
    """Largest difference, by channel over the largest exact value of it; NaN counts as infinite.

    `got` and `exact` are (..., channels). A channel's value counts as at least a hundredth of the largest of all, and
    where it is a single sum over rows, (channels,), as a tenth: where it nearly cancels, rounding of its terms remains.
    """
    is_sum = exact.dim() == 1
    scale = exact.abs() if is_sum else exact.abs().amax(dim=tuple(range(exact.dim() - 1)))
    least = (0.1 if is_sum else 0.01) * float(scale.max())
    difference = float(((got.double() - exact).abs() / scale.clamp_min(least)).max())
    return math.inf if math.isnan(difference) else difference
