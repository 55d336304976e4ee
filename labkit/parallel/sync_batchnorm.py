"""Batch normalization over the batches of all ranks: one collective per pass.

    model = convert_sync_batchnorm(model)     every BatchNorm sees the batches of all ranks
    model = BucketedDDP(model)                averages the gradients of weight and bias

It behaves as torch.nn.SyncBatchNorm, which refuses CPU tensors; docstrings name the differences.

Letters: C channels; n_r values per channel on rank r, N on all ranks; M2 sum of squared deviations
from the mean; w, b weight and bias; x' the normalized input; dy the gradient of the output. Sums
run over a channel's values.

Forward. Each rank sends 3C+1 numbers to all: its rounded local mean (c_r), sums of deviations from
it (D_r) and of their squares (Q_r), and n_r. With e_r = mean - c_r,

    N = sum n_r     mean = sum (n_r c_r + D_r) / N
    M2 = sum (Q_r - 2 e_r D_r + n_r e_r^2)     variance = M2 / N

No squares of large numbers are subtracted: a mean far above the standard deviation costs no digits
(the corrected two-pass algorithm).

Backward. The ranks sum S1 = sum dy and S2 = sum dy x', 2C numbers. With x' = (x - mean) / std,

    dx = w / std (dy - S1 / N - x' S2 / N)        db = S1 and dw = S2 of this rank's values only

Forward combines the ranks' numbers in float64. Both passes subtract the rank's own mean (`center`)
first, which leaves small and nearly exact numbers, and then the rest of the mean (`offset`, or
`rest` in units of std). Saved for backward: references to input and weight, and 4C numbers.

Sources: Ioffe & Szegedy 2015 (arXiv:1502.03167); Chan, Golub & LeVeque 1983, "Algorithms for
computing the sample variance", for the combination and the correction.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from labkit.parallel.collectives import all_gather, all_reduce
from labkit.parallel.prepare import disable_compile
from labkit.parallel.transport import member_group
from labkit.torch_private import BatchNorm

# Newer versions of torch warn about the older name.
_torch_all_gather: Callable[..., Any] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)


class SyncBatchNorm(BatchNorm):
    """Batch normalization of (batch, C, *) over the batches of a group's ranks; statistics are
    float32 or float64.

    Evaluation, and a single rank, need no collective: then it is plain batch normalization. All
    ranks of the group call it in the same order, with empty batches, too, and all or none of the
    inputs require a gradient. Arguments, parameters, buffers and `state_dict` are those of torch's
    BatchNorm; C is `num_features`.

    Args:
        momentum: weight of this batch in the running statistics; None: the mean over all batches.
        affine: with a weight and a bias per channel. Their gradients are local, as torch's are.
        process_group: ranks whose batches are normalized together; None: all ranks.
        bias: if False, `affine` means a weight only.

    A call raises ValueError for an input that is not floating-point or not (batch, C, *), for fewer
    than two values per channel in training (torch's lets these pass), and on a rank outside the
    group; backward RuntimeError with `create_graph`.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
    ):
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype
        )
        self.process_group = process_group
        if not bias:
            self.register_parameter("bias", None)

    def forward(self, input: Tensor) -> Tensor:
        """Normalize (batch, C, *); shape, dtype and memory format stay."""
        self._check_input_dim(input)
        group = None if dist.GroupMember.WORLD is None else member_group(self.process_group)
        if not self.training or group is None or group.size() == 1:
            return super().forward(input)
        output: Tensor = _normalize(input, self.weight, self.bias, self.eps, group, self._track)
        return output

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not None:
            raise TypeError(
                "a SyncBatchNorm with a process_group is tied to its ranks: save its state_dict"
            )
        return self.__dict__

    def _check_input_dim(self, input: Tensor) -> None:
        shape = tuple(input.shape)
        if input.dim() < 2 or shape[1] != self.num_features or not self.num_features:
            raise ValueError(
                f"expected an input of shape (batch, {self.num_features}, ...), got {shape}"
            )
        if not input.is_floating_point():
            raise ValueError(f"expected a floating-point input, got {input.dtype}")

    def _track(self, mean: Tensor, m2: Tensor, total: Any) -> None:
        """Move running statistics, if there are any, towards those of this batch."""
        if not self.track_running_stats:
            return
        momentum = self.momentum or 0.0
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                momentum = 1.0 / float(self.num_batches_tracked)
        for running, value in ((self.running_mean, mean), (self.running_var, m2 / (total - 1))):
            if running is not None:
                running.lerp_(value.to(running.dtype), momentum)


def convert_sync_batchnorm(module: nn.Module, group: dist.ProcessGroup | None = None) -> nn.Module:
    """Make every BatchNorm in `module`, torch's of any dimension or synchronized, a
    `SyncBatchNorm`; return `module`.

    Layers change their class in place, and keep parameters, buffers, options, mode and hooks:
    optimizers keep working, and a layer that is used in several places stays one (torch's
    conversion misses all but the first). Raises ValueError, with nothing changed, for a lazy
    BatchNorm, another forward, and pruned or parametrized layers.
    """
    layers: list[Any] = [layer for layer in module.modules() if isinstance(layer, BatchNorm)]
    for layer in layers:
        _check_convertible(layer)
    for layer in layers:
        layer.__class__ = SyncBatchNorm
        layer.process_group = group
    return module


def _check_convertible(layer: BatchNorm) -> None:
    tensors = (*layer._parameters.values(), *layer._buffers.values())
    if any(tensor is not None and is_lazy(tensor) for tensor in tensors):
        raise ValueError(
            f"expected layers that know their number of features: run a batch through {layer} first"
        )
    plain_forwards = (BatchNorm.forward, nn.SyncBatchNorm.forward, SyncBatchNorm.forward)
    if type(layer).forward not in plain_forwards or "forward" in layer.__dict__:
        raise ValueError(
            f"expected BatchNorm's forward, and {type(layer).__name__} has another: convert it by"
            " hand"
        )
    if not {"weight", "bias"} <= layer._parameters.keys():
        raise ValueError(
            f"expected plain parameters, and {layer} is pruned or parametrized: remove that first"
        )


class _Normalize(torch.autograd.Function):
    """(input, weight, bias, eps, group, track) -> output. `track` gets mean and M2, (C,), and N
    over all ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        group: dist.ProcessGroup,
        track: Callable[[Tensor, Tensor, Any], None],
    ) -> Tensor:
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        count = x.numel() // x.shape[1]
        center = _local_mean(x, dtype)
        deviations = x - _along_channels(center, x)
        sums = _channel_sums(
            deviations, deviations, torch.zeros_like(center), torch.ones_like(center)
        )
        total, mean, m2, offsets = _combine(
            _gather([center, *sums, center.new_full((1,), count)], group)
        )
        # Reading a number waits for the GPU: only if the sum can be that small.
        if count < 2 and total < 2:
            raise ValueError(
                f"expected more than one value per channel in training, got {int(total)} on all"
                " ranks"
            )
        track(mean, m2, total)
        # Cast now: operators with mixed dtypes are several times slower on a CPU.
        inverse_std = m2.div_(total).add_(eps).rsqrt_().to(dtype)
        # backward keeps it, and no other rank's
        offset = offsets[group.rank()].to(dtype, copy=True)
        scale = inverse_std if weight is None else (weight * inverse_std).to(dtype)
        shift = (
            offset * -scale
            if bias is None
            else torch.addcmul(bias, offset, scale, value=-1).to(dtype)
        )
        output = torch.addcmul(
            _along_channels(shift, x), deviations, _along_channels(scale, x), out=deviations
        )
        # the weight must not change meanwhile
        ctx.save_for_backward(x, weight, center, offset, inverse_std, scale)
        ctx.group = group
        ctx.total = total
        return output.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph
            raise RuntimeError(
                "SyncBatchNorm has no second derivative: expected a backward pass without"
                " create_graph"
            )
        x, weight, center, offset, inverse_std, scale = ctx.saved_tensors
        if dy.stride() != x.stride():
            dy = torch.empty_like(x).copy_(dy)
        rest = offset * inverse_std
        s1, s2 = _channel_sums(dy, x, center, inverse_std)
        if x.numel():  # else 0, and the rest may be infinite
            s2 = s2.addcmul_(rest, s1, value=-1)
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        d_weight = s2.to(weight.dtype) if needs_weight else None
        d_bias = s1.to(weight.dtype) if needs_bias else None
        # No collective: all ranks' inputs require a gradient, or none's, so none waits here.
        if not needs_x:
            return None, d_weight, d_bias, None, None, None
        sums = torch.stack([s1, s2])
        if sums.device.type == "cpu":
            all_reduce(sums, ctx.group, op="sum")
        else:
            dist.all_reduce(sums, group=ctx.group)
        # dx = scale dy + slope (x - center) + constant
        constant, slope = sums.mul_(scale / -ctx.total).unbind()
        constant.addcmul_(slope, rest, value=-1)
        slope *= inverse_std
        dx = x - _along_channels(center, x)
        torch.addcmul(_along_channels(constant, x), dx, _along_channels(slope, x), out=dx)
        dx.addcmul_(dy, _along_channels(scale, x))
        return dx.to(x.dtype), d_weight, d_bias, None, None, None


_normalize = disable_compile(_Normalize.apply)


def _local_mean(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mean of each channel, (C,), rounded to the dtype."""
    axes = [axis for axis in range(x.dim()) if axis != 1]
    return x.mean(axes, dtype=dtype) if x.numel() else x.new_zeros(x.shape[1], dtype=dtype)


def _gather(parts: list[Tensor], group: dist.ProcessGroup) -> Tensor:
    """Gather every rank's parts, one vector each; return (ranks, length) in float64. Forward's
    collective."""
    gathered = parts[0].new_empty(group.size(), 3 * len(parts[0]) + 1)
    mine = torch.cat(parts, out=gathered[group.rank()])
    # vectors as short as these wait for gloo, not for their bytes
    if gathered.device.type == "cpu":
        all_gather(gathered, group)
    else:
        _torch_all_gather(gathered.view(-1), mine, group=group)
    return gathered.double()


def _combine(statistics: Tensor) -> tuple[Any, Tensor, Tensor, Tensor]:
    """Combine the ranks' [center, sum of deviations, sum of their squares, count], (ranks, 3C+1) in
    float64.

    Returns count (a number on a CPU), mean and M2 (C,) of all values, and the mean minus each
    center (ranks, C).
    """
    channels = statistics.shape[1] // 3
    centers, sums, squares, counts = statistics.split_with_sizes(
        [channels, channels, channels, 1], dim=1
    )
    total: Any = counts.sum()
    if not total.is_cuda:
        # arithmetic with Python's numbers costs no operators; on a GPU, reading one waits
        total = total.item()
    mean = torch.addcmul(sums, counts, centers).sum(0).div_(total)
    offsets = mean - centers
    half_cross = torch.addcmul(sums, counts, offsets, value=-0.5)
    m2 = torch.addcmul(squares, offsets, half_cross, value=-2).sum(0)
    # rounding may take a channel of equal values below zero
    return total, mean, m2.clamp_min_(0), offsets


def _channel_sums(
    values: Tensor, x: Tensor, center: Tensor, factor: Tensor
) -> tuple[Tensor, Tensor]:
    """Sum values and values (x - center) factor over each channel, (C,) in the dtype of center.

    One pass without a product the size of x: torch's batch norm backward for bias and weight.
    """
    if not x.numel():
        return torch.zeros_like(center), torch.zeros_like(center)
    arguments = (values, x, factor, None, None, center, factor, True, 0.0, [False, True, True])
    _, weighted, plain = torch.ops.aten.native_batch_norm_backward(*arguments)
    return plain, weighted


def _along_channels(vector: Tensor, like: Tensor) -> Tensor:
    """View (C,) as (C, 1, ...), which broadcasts over (batch, C, ...)."""
    return vector if like.dim() == 2 else vector.view(-1, *[1] * (like.dim() - 2))
