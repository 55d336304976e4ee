"""Worker of the SyncBatchNorm lab: check each layer against float64, then time it.

Each rank has its rows of one whole batch, shifted by its rank number: statistics of one rank's rows
are far from the whole batch's. Backward starts with a gradient of ones for the first half of the
batch and zeros for the other, as the published benchmark's loss does.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labkit.bench.check import refusal_columns, status_columns
from labkit.bench.checksums import first_wrong
from labkit.bench.memory import record_allocations, saved_for_backward
from labkit.lab.point import DevicePoint
from labkit.parallel.collectives import all_gather, all_reduce
from labkit.parallel.ranks.worker import use_device
from labkit.parallel.sync_batchnorm import SyncBatchNorm
from labkit.studies.shared.alternatives import check_and_time, row_of
from labkit.studies.shared.checks import furthest, judge

LABKIT = "labkit"
TORCH = "torch"
PLAIN = "plain_local_batch"
WHOLE = "plain_whole_batch"
# Features -> a layer for inputs (rows, features); a user may add to it (`register`).
LAYERS: dict[str, Callable[[int], nn.Module]] = {
    LABKIT: SyncBatchNorm,
    TORCH: nn.SyncBatchNorm,
    PLAIN: nn.BatchNorm1d,
    WHOLE: nn.BatchNorm1d,
}
COLLECTIVES = "collectives_alone"
ALTERNATIVES = (*LAYERS, COLLECTIVES)
FORWARD = "forward"
BACKWARD = "backward"
BOTH = "forward and backward"
TENSORS = (
    "output",
    "gradient of the input",
    "gradient of weight",
    "gradient of bias",
    "running_mean",
    "running_var",
)
# Relative to a channel's largest expected value. Float32 stays far below it. If one rank of 16 is
# missing, a mean, a variance or a sum of gradients is off by a hundredth or more.
TOLERANCE = 1e-4
# Of the whole batch on a rank: inputs and gradients of every layer, exact results in float64.
N_COPIES = 30


@dataclass(frozen=True, kw_only=True)
class SyncBatchNormPoint(DevicePoint):
    """A batch, and the layers compared on it."""

    batch: int
    """Rows of all ranks together."""
    features: int
    alternatives: tuple[str, ...] = ()
    calls: int = 5
    """A sample is the mean of so many calls: one takes a millisecond or less."""

    @property
    def refusal(self) -> str | None:
        few = "plain BatchNorm needs two rows per rank, and there are fewer"
        return few if self.batch < 2 * self.world_size else None

    @property
    def needed_bytes(self) -> float:
        return (N_COPIES + 2 * self.calls) * 4 * self.batch * self.features


def register(name: str, layer: Callable[[int], nn.Module]) -> dict[str, Callable[[int], nn.Module]]:
    """Add a user's layer, which normalizes over all ranks. ValueError for a name that is taken.

    `layer` is called with the number of features, and returns a module with `weight`, `bias`,
    `running_mean` and `running_var`, as nn.BatchNorm1d has them.
    """
    if name in ALTERNATIVES:
        raise ValueError(f"expected a name other than {', '.join(ALTERNATIVES)}")
    LAYERS[name] = layer
    return LAYERS


class Batch:
    """Input of all ranks and gradient of the output, each (batch, features) in float32."""

    def __init__(self, point: SyncBatchNormPoint, device: str) -> None:
        rank = dist.get_rank()
        ranks = dist.get_world_size()
        # Drawn on the CPU, so that every device has the same numbers.
        whole = torch.randn(
            point.batch, point.features, generator=torch.Generator().manual_seed(point.seed)
        )
        bounds = [point.batch * index // ranks for index in range(ranks + 1)]
        # Shifted by the rank: statistics of one rank's rows are far from those of the whole.
        for index in range(ranks):
            whole[bounds[index] : bounds[index + 1]] += index
        # As in the published benchmark: the loss is a sum over the first half of the batch.
        gradient = torch.zeros(point.batch, point.features)
        gradient[: point.batch // 2] = 1
        self.whole = whole.to(device)
        self.gradient = gradient.to(device)
        self.rows = slice(bounds[rank], bounds[rank + 1])

    def rows_for(self, name: str) -> slice:
        return slice(None) if name == WHOLE else self.rows


class Layer:
    """A batch-norm layer, its input and its output's gradient.

    `forward` and `backward` are timed.
    """

    def __init__(self, name: str, batch: Batch):
        self.name = name
        rows = batch.rows_for(name)
        # Cloned: of a view, autograd would hold the whole batch, and the peak would count it.
        self.x = batch.whole[rows].clone().requires_grad_()
        self.gradient = batch.gradient[rows].clone()
        self.layer = _with_affine(LAYERS[name](self.x.shape[1])).to(self.x.device)
        # Several: the clock runs all forward passes of a sample, then all backward passes.
        self.outputs: list[Tensor] = []

    def forward(self) -> None:
        self.outputs.append(self.layer(self.x))

    def backward(self) -> None:
        """Run backward of the last forward pass."""
        self.compute_gradients(self.gradient)

    def run(self) -> None:
        self.forward()
        self.backward()

    def compute_gradients(self, of_output: Tensor) -> tuple[Tensor, ...]:
        """Return gradients of input, weight and bias."""
        inputs = [self.x, *_affine(self.layer)]
        return torch.autograd.grad(self.outputs.pop(), inputs, of_output)


def _collectives(features: int, device: str) -> dict[str, Callable[[], Any]]:
    """Return the layer's collectives without its arithmetic.

    Three numbers per feature and the count are gathered, two sums reduced.
    """
    # Zeros, which no number of all-reduces makes overflow.
    statistics = torch.zeros(dist.get_world_size() * (3 * features + 1), device=device)
    sums = torch.zeros(2 * features, device=device)
    forward = partial(all_gather, statistics)
    backward = partial(all_reduce, sums, op="sum")
    return {FORWARD: forward, BACKWARD: backward, BOTH: lambda: (forward(), backward())}


def _affine(layer: nn.Module) -> list[nn.Parameter]:
    return [layer.get_parameter(name) for name in ("weight", "bias")]


def _with_affine(layer: nn.Module) -> nn.Module:
    """Give channels different weights and biases, some negative, exact in every dtype."""
    generator = torch.Generator().manual_seed(99)
    for parameter in _affine(layer):
        parameter.data.copy_(
            torch.randint(-32, 32, parameter.shape, generator=generator) / 16 + 1 / 32
        )
    return layer


def measure(point: SyncBatchNormPoint) -> Iterator[dict[str, Any]]:
    """Yield rows of one point: seconds of every alternative and phase, and memory."""
    device = use_device(point.device)
    layers = dict[str, Layer]()
    batch = Batch(point, device)
    rows: dict[str, dict[str, Any]] = {name: {"alternative": name} for name in point.alternatives}
    if TORCH in rows and device == "cpu":
        rows[TORCH] |= refusal_columns("torch's SyncBatchNorm refuses CPU tensors")

    def check_one(name: str) -> tuple[dict[str, Any], dict[str, Callable[[], Any]]]:
        if name == COLLECTIVES:
            actions = _collectives(point.features, device)
            tensor = torch.empty(2 * point.features, device=device)
            return status_columns(first_wrong(partial(all_reduce, op="sum"), tensor)), actions
        layer = Layer(name, batch)
        layers[name] = layer
        actions = {FORWARD: layer.forward, BACKWARD: layer.backward, BOTH: layer.run}
        if _is_idle(name):  # its rounds only keep this rank in step with rank 0
            actions = dict.fromkeys(actions, lambda: None)
        return check_layer(layer, batch), actions

    right = set()
    for row in check_and_time(
        rows, check_one, calls=point.calls, device=device, before=dist.barrier, **point.rounds
    ):
        if "seconds" in row:
            right.add(row["alternative"])
        if not _is_idle(row["alternative"]):
            yield row
    for name in layers:
        if name in right and not _is_idle(name):
            memory = partial(_measure_memory, name, batch, device)
            yield {"alternative": name} | row_of(name, memory, device=device)


def _is_idle(name: str) -> bool:
    return name == WHOLE and dist.get_rank() != 0


def check_layer(layer: Layer, batch: Batch) -> dict[str, Any]:
    """Return `error`, `status` and `reason` of a layer against BatchNorm in float64, on all ranks.

    `error` is the largest of any rank; `reason` says where the layer is wrong. Errors of `TENSORS`
    are per channel, relative to its largest expected value. The output's gradient is random here:
    in the timed one some ranks have zeros only, and a missing contribution of theirs would not
    show. A layer that normalizes over the local batch is compared with that, the others with the
    whole batch, whose gradients of weight and bias are sums over ranks.
    """
    gradient = torch.randn(batch.whole.shape, generator=torch.Generator().manual_seed(1)).to(
        batch.whole.device
    )
    layer.forward()
    output = layer.outputs[-1].detach()
    dx, *affine = layer.compute_gradients(gradient[batch.rows_for(layer.name)])
    # A synchronized layer leaves these local: a wrapper of data parallelism adds them up.
    if layer.name not in (PLAIN, WHOLE):
        for one in affine:
            dist.all_reduce(one)
    actual = [
        output,
        dx,
        *affine,
        layer.layer.get_buffer("running_mean"),
        layer.layer.get_buffer("running_var"),
    ]
    pairs = zip(actual, _exact(layer, batch, gradient), strict=True)
    tensors = dict(zip(TENSORS, pairs, strict=True))
    errors = {name: _relative_error(*pair) for name, pair in tensors.items()}
    return judge(errors, TOLERANCE, lambda name: furthest(*tensors[name]))


def _exact(layer: Layer, batch: Batch, gradient: Tensor) -> list[Tensor]:
    """Return the `TENSORS` of a layer by torch's BatchNorm in float64, in one process."""
    # Plain BatchNorm normalizes this rank's rows, the others those of all ranks.
    normalized = batch.rows if layer.name == PLAIN else slice(None)
    x = batch.whole[normalized].double().requires_grad_()
    reference = _with_affine(nn.BatchNorm1d(x.shape[1], dtype=torch.float64)).to(x.device)
    output = reference(x)
    inputs = [x, *reference.parameters()]
    dx, *affine = torch.autograd.grad(output, inputs, gradient[normalized].double())
    # Of all of them, the rows that the layer returns on this rank.
    returned = slice(None) if layer.name == PLAIN else batch.rows_for(layer.name)
    buffers = [reference.get_buffer("running_mean"), reference.get_buffer("running_var")]
    return [output.detach()[returned], dx[returned], *affine, *buffers]


def _relative_error(actual: Tensor, exact: Tensor) -> float:
    """Return the largest difference per channel, relative to the channel's largest exact value.

    NaN counts as infinite. A channel's value counts as at least a hundredth of the largest of all,
    and a single sum over rows, (channels,), as a tenth: if the sum nearly cancels, rounding of its
    terms remains.
    """
    scale = exact.abs()
    share = 0.1
    if exact.dim() > 1:
        scale = scale.amax(dim=tuple(range(exact.dim() - 1)))
        share = 0.01
    smallest = share * float(scale.max())
    difference = float(((actual.double() - exact).abs() / scale.clamp_min(smallest)).max())
    return math.inf if math.isnan(difference) else difference


def _measure_memory(name: str, batch: Batch, device: str) -> dict[str, Any]:
    """Return bytes saved for backward, and the peak of both passes, layer and input included."""
    with record_allocations(device) as record:
        layer = Layer(name, batch)
        saved = saved_for_backward(layer.forward)[1]
        layer.backward()
        with record.window("step"):
            layer.run()
        del layer
    return {"saved_bytes": sum(saved.values()), "peak_bytes": record.peaks["step"]}
