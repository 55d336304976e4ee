"""Batch normalization over the batches of all ranks: one collective forward, one backward, on CPU and CUDA.

    model = convert_sync_batchnorm(model)         every BatchNorm of the model now sees the whole batch
    model = BucketedDDP(model)                    which averages the gradients of weight and bias

Behavior is that of torch.nn.SyncBatchNorm (which refuses CPU tensors); what differs is said where it does.

Letters: C channels; n_r values per channel on rank r, N on all ranks; M2 sum of squared deviations from the mean; w, b
weight and bias; x' the normalized input; dy the gradient of the output. Sums run over a channel's values.

Forward. Each rank sends 3C+1 numbers to all: its local mean as rounded (c_r), sums of deviations from it (D_r) and of
their squares (Q_r), and n_r. With e_r = mean - c_r,

    N = sum n_r     mean = sum (n_r c_r + D_r) / N     M2 = sum (Q_r - 2 e_r D_r + n_r e_r^2)     variance = M2 / N

Counts travel along, so ranks may have batches of any size, or none. No square of a large number is subtracted from
another: a mean that is large compared with the standard deviation costs no digits (the corrected two-pass algorithm).

Backward. Each rank knows its part of S1 = sum dy and S2 = sum dy x', 2C numbers; these are summed over ranks. With
x' = (x - mean) / std, in which both mean and std depend on every x,

    dx = w / std (dy - S1 / N - x' S2 / N)        db = S1 and dw = S2 of this rank's values only

Numbers of length C are float64 where they are combined. Backward takes the mean apart into the nearest number of the
input's precision (`center`) and what it lacks (`rest`): x - center is small and nearly exact, x - mean as good.

Memory. The output is made in place of the deviations, the gradient of the input too. Saved for backward: the input,
by reference, and 4C+1 numbers.

Sources: Ioffe & Szegedy 2015 (arXiv:1502.03167); Chan, Golub & LeVeque 1983, "Algorithms for computing the sample
variance", for the combination and for the correction.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from labkit.parallel.collectives import all_gather, all_reduce
from labkit.parallel.disable_compile import disable_compile

# Newer versions of torch warn of the older name.
_torch_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class SyncBatchNorm(_BatchNorm):
    """Batch normalization of (batch, C, *) over the batches of all ranks of a group; statistics are float32 or float64.

    In training mode with more than one rank; else it is plain batch normalization, without a collective. Every rank of
    the group calls it, in the same order, those with an empty batch included, and either all or none of the inputs
    require a gradient. Parameters, buffers and `state_dict` are those of torch's BatchNorm.

    Args:
        num_features: C.
        eps: added to the variance.
        momentum: weight of this batch in the running statistics; None: all batches weigh alike.
        affine: with a weight and a bias for each channel. Their gradients are local, as torch's are.
        track_running_stats: without, evaluation normalizes by the statistics of the local batch.
        process_group: whose batches count together; None: all ranks.
        bias: if False, only the weight is there.

    Raises ValueError, when called, for an input that is not floating-point or not (batch, num_features, *), for less
    than two values a channel in training (torch's lets these pass), and on a rank that is not of the group.
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
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self.process_group = process_group
        if not bias:
            self.register_parameter("bias", None)

    def forward(self, input: Tensor) -> Tensor:
        """(batch, C, *) -> the same shape, dtype and memory format."""
        self._check_input_dim(input)
        group = self._active_group()
        if not self.training or group is None or group.size() == 1:
            return super().forward(input)
        output, mean, variance = _normalize(input, self.weight, self.bias, self.eps, group)
        if self.track_running_stats:
            self._track(mean, variance)
        return output

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not None:
            raise TypeError(
                "a SyncBatchNorm with a process_group is tied to its ranks: save its state_dict, or convert a copy"
            )
        return self.__dict__

    def _check_input_dim(self, input: Tensor) -> None:
        shape = tuple(input.shape)
        if input.dim() < 2 or shape[1] != self.num_features or not self.num_features:
            raise ValueError(f"expected an input of shape (batch, {self.num_features}, ...), got {shape}")
        if not input.is_floating_point():
            raise ValueError(f"expected a floating-point input, got {input.dtype}")

    def _active_group(self) -> dist.ProcessGroup | None:
        """The group whose batches count; None where there is no process group at all."""
        world = dist.group.WORLD if dist.is_available() else None
        group = self.process_group if world is not None and self.process_group is not None else world
        if not isinstance(group, dist.ProcessGroup | None):
            raise ValueError("expected to be called on ranks of process_group only; this rank is not one of them")
        return group

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor) -> None:
        """Running statistics move towards those of this batch."""
        momentum = self.momentum or 0.0
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                momentum = 1.0 / float(self.num_batches_tracked)
        for running, value in ((self.running_mean, mean), (self.running_var, variance)):
            if running is not None:
                running.lerp_(value.to(running.dtype), momentum)


def convert_sync_batchnorm(module: nn.Module, group: dist.ProcessGroup | None = None) -> nn.Module:
    """Replace every BatchNorm in `module`, torch's of any dimension or synchronized, by a `SyncBatchNorm`.

    Parameters and buffers are the very same tensors, so an optimizer that has them keeps working; mode and options
    stay. A layer that is used in several places stays one layer (torch's conversion misses all but the first).
    Hooks of replaced layers are lost, as with torch's. Changes `module` and returns it, or the new layer if it is
    itself a BatchNorm. Raises ValueError, with nothing changed, for a lazy BatchNorm that has seen no input, and for
    layers with a forward pass or tensors that the new layer would not have: subclasses, pruned or parametrized ones.
    """
    for layer in module.modules():
        if isinstance(layer, _BatchNorm):
            _check_convertible(layer)
    return _converted(module, group, {})


def _converted(module: nn.Module, group: dist.ProcessGroup | None, done: dict[nn.Module, nn.Module]) -> nn.Module:
    if module not in done:
        done[module] = _synchronized(module, group) if isinstance(module, _BatchNorm) else module
        for name, child in module._modules.items():
            if child is not None:
                done[module]._modules[name] = _converted(child, group, done)
    return done[module]


def _check_convertible(layer: _BatchNorm) -> None:
    if any(
        tensor is not None and is_lazy(tensor) for tensor in (*layer._parameters.values(), *layer._buffers.values())
    ):
        raise ValueError(f"expected layers that know their number of features: run a batch through {layer} first")
    plain_forwards = (_BatchNorm.forward, nn.SyncBatchNorm.forward, SyncBatchNorm.forward)
    if type(layer).forward not in plain_forwards or "forward" in layer.__dict__:
        raise ValueError(f"expected BatchNorm's forward, and {type(layer).__name__} has another: convert it by hand")
    if "weight" not in layer._parameters:
        raise ValueError(f"expected plain parameters, and {layer} is pruned or parametrized: remove that first")


def _synchronized(layer: _BatchNorm, group: dist.ProcessGroup | None) -> SyncBatchNorm:
    tensors = {**layer._parameters, **layer._buffers}
    options = (layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats, group)
    converted = SyncBatchNorm(*options, device="meta")
    for name, tensor in tensors.items():
        setattr(converted, name, tensor)
    return converted.train(layer.training)


@disable_compile
def _normalize(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _Normalize.apply(*arguments)


class _Normalize(torch.autograd.Function):
    """(input, weight, bias, eps, group) -> output; mean and unbiased variance of the whole batch, (C,) in float64."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: dist.ProcessGroup
    ) -> tuple[Tensor, Tensor, Tensor]:
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        count = x.numel() // x.shape[1]
        local_center = _local_mean(x, dtype)
        deviations = x - _along_channels(local_center, x)
        sums = _channel_sums(deviations, deviations, torch.zeros_like(local_center))
        total, mean, m2, offsets = _combine(_gather([local_center, *sums, sums[0].new_full((1,), count)], group))
        # Looking at a number on a GPU waits for it: only where the sum can be that small.
        if count < 2 and total < 2:
            raise ValueError(f"expected more than one value per channel in training, got {int(total)} on all ranks")
        inverse_std = torch.rsqrt(m2 / total + eps)
        scale = inverse_std if weight is None else inverse_std * weight
        shift = offsets[group.rank()] * -scale
        if bias is not None:
            shift += bias
        # To the dtype before the large tensors: mixed ones are several times slower on a CPU.
        scale, shift = scale.to(dtype), shift.to(dtype)
        output = torch.addcmul(_along_channels(shift, x), deviations, _along_channels(scale, x), out=deviations)
        ctx.save_for_backward(x, weight, mean, inverse_std.to(dtype), total)
        ctx.group = group
        variance = m2 / (total - 1)
        ctx.mark_non_differentiable(mean, variance)
        return output.to(x.dtype), mean, variance

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        if not torch.is_grad_enabled():
            return *_Normalize._differentiate(ctx, dy), None, None
        with torch.no_grad():  # create_graph
            gradients = _Normalize._differentiate(ctx, dy)
        x = ctx.saved_tensors[0]
        return *(each if each is None else _NoSecondDerivative.apply(each, dy, x) for each in gradients), None, None

    @staticmethod
    def _differentiate(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients of input, weight and bias."""
        x, weight, mean, inverse_std, total = ctx.saved_tensors
        dy = dy if dy.stride() == x.stride() else torch.empty_like(x).copy_(dy)
        center = mean.to(inverse_std.dtype)
        rest = (mean - center).to(center.dtype)
        s1, s2 = _channel_sums(dy, x, center)
        s2 = s2.addcmul_(rest, s1, value=-1).mul_(inverse_std)
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        d_weight = s2.to(weight.dtype) if needs_weight else None
        d_bias = s1.to(weight.dtype) if needs_bias else None
        if not needs_x:
            return None, d_weight, d_bias
        sums = torch.stack([s1, s2])
        _sum_over_ranks(sums, ctx.group)
        # dx = scale dy + slope (x - center) + constant
        scale = inverse_std if weight is None else (weight * inverse_std).to(center.dtype)
        constant, slope = sums.mul_(scale / -total)
        slope *= inverse_std
        constant.addcmul_(slope, rest, value=-1)
        dx = x - _along_channels(center, x)
        torch.addcmul(_along_channels(constant, x), dx, _along_channels(slope, x), out=dx)
        dx.addcmul_(dy, _along_channels(scale, x))
        return dx.to(x.dtype), d_weight, d_bias


class _NoSecondDerivative(torch.autograd.Function):
    """(gradient, the tensors it was computed from) -> the gradient, which refuses to be differentiated."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *sources: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:
        raise RuntimeError("SyncBatchNorm has no second derivative, which a gradient penalty needs: take a LayerNorm")


def _local_mean(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The mean of each channel, (C,), as rounded to the dtype."""
    if not x.numel():
        return torch.zeros(x.shape[1], dtype=dtype, device=x.device)
    return x.mean([axis for axis in range(x.dim()) if axis != 1], dtype=dtype)


def _gather(parts: list[Tensor], group: dist.ProcessGroup) -> Tensor:
    """The vectors of all ranks, each made of parts, (ranks, length) in float64: the collective of the forward pass."""
    gathered = parts[0].new_empty(group.size(), sum(part.numel() for part in parts))
    mine = torch.cat(parts, out=gathered[group.rank()])
    if gathered.device.type == "cpu":  # vectors as short as these wait for gloo, not for their bytes
        all_gather(gathered, group)
    else:
        _torch_all_gather(gathered.view(-1), mine, group=group)
    return gathered.double()


def _sum_over_ranks(sums: Tensor, group: dist.ProcessGroup) -> None:
    """In place: the collective of the backward pass."""
    if sums.device.type == "cpu":
        all_reduce(sums, group, op="sum")
    else:
        dist.all_reduce(sums, group=group)


def _combine(statistics: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Count (), mean and M2 (C,) of the union of sets, and the mean minus each center (sets, C).

    Of each set [center, sum of deviations from it, sum of their squares, count], (sets, 3C+1) in float64.
    """
    channels = statistics.shape[1] // 3
    centers, sums, squares, counts = statistics.split_with_sizes([channels, channels, channels, 1], dim=1)
    total = counts.sum()
    mean = torch.addcmul(sums, counts, centers).sum(0).div_(total)
    offsets = mean - centers
    m2 = torch.addcmul(squares, offsets, (counts * offsets).sub_(sums, alpha=2)).sum(0)
    return total, mean, m2.clamp_min_(0), offsets  # rounding may take a channel of equal values below zero


def _channel_sums(dy: Tensor, x: Tensor, center: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of dy and of dy (x - center) over each channel, (C,) in the dtype of center.

    In one pass and without a product the size of x: the part of torch's batch norm backward for bias and weight.
    """
    if not x.numel():
        return torch.zeros_like(center), torch.zeros_like(center)
    ones = torch.ones_like(center)
    arguments = (dy, x, ones, None, None, center, ones, True, 0.0, [False, True, True])
    _, weighted, plain = torch.ops.aten.native_batch_norm_backward(*arguments)
    return plain, weighted


def _along_channels(vector: Tensor, like: Tensor) -> Tensor:
    """(C,) as (C, 1, ...), to be broadcast over a tensor (batch, C, ...)."""
    return vector if like.dim() == 2 else vector.view(-1, *[1] * (like.dim() - 2))
