"""Batches on which `SyncBatchNorm` is held against torch's BatchNorm in float64 on the whole batch,
and how."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from labkit.parallel.sync_batchnorm import SyncBatchNorm
from labkit.parallel.transport.point_to_point import StreamTransport
from labkit.parallel.transport.shared_memory import SharedTransport

STEPS = 2


@dataclass(frozen=True)
class Case:
    """Rows of the batch of each rank (repeated if there are more ranks), and the shape of a row."""

    rows: tuple[int, ...]
    row: tuple[int, ...]
    dtype: torch.dtype = torch.float64
    mean: float = 0.0
    """Of the input; that of rank r is larger by r, and the standard deviation is 1."""
    options: dict[str, Any] = field(default_factory=dict)
    layout: torch.memory_format = torch.contiguous_format
    strided: bool = False
    """The input has gaps in memory."""

    def rows_of(self, world_size: int) -> list[int]:
        return [self.rows[rank % len(self.rows)] for rank in range(world_size)]

    @property
    def tolerances(self) -> tuple[float, float]:
        """Of what has the input's shape, and of the rest, as a part of the largest value (at least
        1)."""
        rest = 1e-10 if self.dtype == torch.float64 else 1e-5
        return max(rest, torch.finfo(self.dtype).eps / 2 if self.dtype.itemsize == 2 else 0.0), rest

    def batches(self, step: int, world_size: int) -> list[Tensor]:
        """The input of every rank, rounded to the dtype."""
        generator = torch.Generator().manual_seed(step)
        rows = self.rows_of(world_size)
        whole = (
            torch.randn(sum(rows), *self.row, generator=generator, dtype=torch.float64) + self.mean
        )
        return [(part + rank).to(self.dtype) for rank, part in enumerate(whole.split(rows))]


def grid(world_size: int) -> dict[str, Case]:
    """Features x batch x dtype of the published measurements; the batch is that of all ranks."""
    return {
        f"{batch}x{features}, {str(dtype).removeprefix('torch.')}": Case(
            (batch // world_size,), (features,), dtype
        )
        for features, batch in ((128, 32), (1024, 64))
        for dtype in (torch.float64, torch.float32)
    }


CASES = {
    "NCL": Case((4,), (3, 5)),
    "NCHW": Case((4,), (3, 5, 2)),
    "NCHW, channels last": Case((4,), (3, 5, 2), layout=torch.channels_last),
    "NCHW, strided": Case((4,), (3, 5, 2), strided=True),
    "NCDHW": Case((4,), (3, 2, 3, 2)),
    "one row a rank": Case((1,), (7,)),
    "unequal": Case((5, 1, 2), (6,)),
    "empty": Case((0, 5), (6,)),
    "empty, NCHW": Case((5, 0, 0, 2), (3, 4, 2)),
    "empty, bfloat16": Case((0, 5), (6,), torch.bfloat16),
    "bfloat16": Case((16,), (6,), torch.bfloat16),
    "bfloat16, NCHW": Case((4,), (3, 5, 4), torch.bfloat16),
    "bfloat16, channels last": Case((4,), (3, 5, 4), torch.bfloat16, layout=torch.channels_last),
    "float16": Case((16,), (6,), torch.float16),
    "momentum=None": Case((4,), (6,), options={"momentum": None}),
    "affine=False": Case((4,), (6,), options={"affine": False}),
    "bias=False": Case((4,), (6,), options={"bias": False}),
    "track_running_stats=False": Case((4,), (6,), options={"track_running_stats": False}),
    "eps=0.1": Case((4,), (6,), options={"eps": 0.1}),
    "mean 1e4, float32": Case((32,), (64,), torch.float32, mean=1e4, options={"momentum": 1.0}),
    "mean 1e6, float32": Case((32,), (64,), torch.float32, mean=1e6, options={"momentum": 1.0}),
    "mean 1e4, unequal, float32": Case(
        (100, 1), (8,), torch.float32, mean=1e4, options={"momentum": 1.0}
    ),
    "mean 1e4, NCHW, float32": Case(
        (16,), (4, 8, 8), torch.float32, mean=1e4, options={"momentum": 1.0}
    ),
}


def errors_on_rank(case: Case) -> dict[str, float]:
    """On a rank: the largest errors of `SyncBatchNorm` by quantity."""
    reference = _reference(case)
    dtype = torch.float64 if case.dtype == torch.float64 else torch.float32
    layer = SyncBatchNorm(case.row[0], dtype=dtype, **case.options)
    layer.load_state_dict(reference.state_dict())
    worst: dict[str, float] = {}
    for step in range(STEPS):
        _note_errors(case, step, reference, layer, worst)
    # Evaluation is torch's: by the local batch if there are no running statistics, and a mean of
    # 1e4 is rounded there.
    if case.options.get("track_running_stats", True) and not case.mean:
        reference.eval()
        layer.eval()
        _note_errors(case, STEPS, reference, layer, worst)
    return worst


def _note_errors(
    case: Case, step: int, reference: nn.Module, layer: nn.Module, worst: dict[str, float]
) -> None:
    """One pass of the reference on the whole batch, and of the layer on this rank's rows."""
    batches = case.batches(step, dist.get_world_size())
    mine = batches[dist.get_rank()]
    begin = sum(len(batch) for batch in batches[: dist.get_rank()])
    half = sum(len(batch) for batch in batches) // 2
    expected = _pass(reference, torch.cat(batches).double(), half)
    for name in ("output", "dx"):
        expected[name] = expected[name][begin : begin + len(mine)]
    got = _pass(layer, _laid_out(case, mine), half - begin)
    assert got["output"].dtype == got["dx"].dtype == case.dtype
    for name, value in got.items():
        if name.startswith("d_"):  # the sum over ranks is the data-parallel wrapper's part
            dist.all_reduce(value)
        worst[name] = max(worst.get(name, 0.0), _error(value, expected[name]))


def torchs(kind: type[nn.Module], channels: int, *, bias: bool = True, **options: Any) -> nn.Module:
    """torch's layer; before 2.12 it takes no `bias`."""
    layer = kind(channels, **options)
    if not bias:
        layer.register_parameter("bias", None)
    return layer


def _reference(case: Case) -> nn.Module:
    """torch's layer in float64; weights and biases differ between channels, and are exact in
    bfloat16."""
    kind = {1: nn.BatchNorm1d, 2: nn.BatchNorm1d, 3: nn.BatchNorm2d, 4: nn.BatchNorm3d}[
        len(case.row)
    ]
    layer = torchs(kind, case.row[0], dtype=torch.float64, **case.options)
    generator = torch.Generator().manual_seed(99)
    for parameter in layer.parameters():
        values = torch.randint(-32, 32, parameter.shape, generator=generator)
        parameter.data.copy_(values / 16 + 1 / 32)
    return layer


def _laid_out(case: Case, batch: Tensor) -> Tensor:
    """The input of a rank as the case has it in memory."""
    if case.strided:
        return torch.stack([batch, torch.full_like(batch, torch.nan)], dim=-1)[..., 0]
    return batch.contiguous(memory_format=case.layout)


class _WithoutGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        return None


def _pass(layer: nn.Module, batch: Tensor, counted_rows: int) -> dict[str, Tensor]:
    """Forward and backward; the loss is the sum of the outputs of the first rows, none if that
    number is below 1."""
    batch = batch.detach().requires_grad_()
    layer.zero_grad()
    output = layer(batch)
    if counted_rows < 1 and layer.training:
        output = _WithoutGradient.apply(output)
    output[: max(counted_rows, 0)].sum().backward()
    assert batch.grad is not None
    found = {"output": output.detach(), "dx": batch.grad}
    found |= {f"d_{name}": p.grad for name, p in layer.named_parameters() if p.grad is not None}
    return found | {name: buffer.clone() for name, buffer in layer.named_buffers()}


def _error(got: Tensor, expected: Tensor) -> float:
    """The largest difference, as a part of the largest expected value, which counts as at least
    1; NaN is infinitely far, since max drops it."""
    assert got.shape == expected.shape
    if not got.numel():
        return 0.0
    error = (got.double() - expected.double()).abs().max()
    return float((error / expected.double().abs().max().clamp_min(1)).nan_to_num(torch.inf))


class CollectivesSeen(TorchDispatchMode):
    """What ranks exchange while this is entered: torch's collectives by name, and runs of labkit's
    transports."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function.namespace == "c10d":
            self.names.append(function._schema.name.removeprefix("c10d::"))
        return function(*args, **kwargs or {})


def collectives_of(function: Callable[[], Any]) -> tuple[Any, list[str]]:
    """What the function returns, and the collectives it runs; on two ranks labkit's own are one run
    each."""
    with CollectivesSeen() as seen, pytest.MonkeyPatch.context() as patch:
        for kind in (SharedTransport, StreamTransport):
            patch.setattr(kind, "run", _noted(kind.run, seen.names))
        result = function()
    return result, seen.names


def _noted(run: Callable[..., None], names: list[str]) -> Callable[..., None]:
    def noting(transport: Any, rounds: Any, call: int = 0) -> None:
        n_messages = sum(map(len, rounds))  # a round may be empty
        names.append(f"{n_messages} message{'s' if n_messages > 1 else ''}")
        run(transport, rounds, call)

    return noting
