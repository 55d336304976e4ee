"""May an optimizer's parameters be cut at any element, at their borders only, or not at all?

AdamW treats every element by itself, so a rank may update any range of elements. Adafactor keeps a mean per row and
column, and Muon orthogonalizes a matrix: they need whole parameters. L-BFGS sees all parameters as one vector. torch's
own classes are listed here; others are tried out on two tiny tensors.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, optim

ELEMENTWISE = frozenset(
    {
        optim.SGD,
        optim.Adam,
        optim.AdamW,
        optim.Adamax,
        optim.NAdam,
        optim.RAdam,
        optim.Adagrad,
        optim.Adadelta,
        optim.RMSprop,
        optim.Rprop,
        optim.ASGD,
    }
)
BY_PARAMETER = frozenset({optim.Adafactor, optim.Muon})
REFUSED: Mapping[type, str] = {
    optim.LBFGS: "its search direction depends on all parameters together",
    optim.SparseAdam: "it is made for sparse gradients",
}
TRIAL_STEPS = 4
HINT = "pass elementwise=True if it updates every element by itself, False if it updates every parameter by itself"


def is_elementwise(
    optimizer_cls: Callable[..., optim.Optimizer], settings: Mapping[str, Any], device: torch.device
) -> bool:
    """Whether parameters may be cut at any element; False: at their borders only.

    Tried out in float32 on `device`, a few steps long: what an optimizer begins to do later is not seen.

    Raises ValueError for one that needs all parameters at once, or that cannot be tried out.
    """
    refuse_coupled(optimizer_cls)
    if optimizer_cls in ELEMENTWISE or optimizer_cls in BY_PARAMETER:
        return optimizer_cls in ELEMENTWISE
    name = getattr(optimizer_cls, "__name__", repr(optimizer_cls))
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randn(shape, generator=generator).to(device) for shape in ((6, 4), (5, 3)))
    try:
        together, _ = _trial(optimizer_cls, settings, [first, second])
        alone = [_trial(optimizer_cls, settings, [tensor])[0][0] for tensor in (first, second)]
    except Exception as error:
        raise ValueError(f"{name} cannot be tried out ({type(error).__name__}: {error}): {HINT}") from error
    if all(torch.equal(after, before) for after, before in zip(together, (first, second), strict=True)):
        raise ValueError(f"{name} changed nothing in {TRIAL_STEPS} steps: {HINT}")
    if not _all_close(together, alone):
        raise ValueError(f"{name} cannot be sharded: its update of one parameter depends on the others")
    return _is_cut_unnoticed(optimizer_cls, settings, first, alone[0])


def refuse_coupled(optimizer_cls: Callable[..., optim.Optimizer]) -> None:
    """ValueError for torch's classes that no shard of the parameters is enough for."""
    for refused, why in REFUSED.items():
        if isinstance(optimizer_cls, type) and issubclass(optimizer_cls, refused):
            raise ValueError(f"{optimizer_cls.__name__} cannot be sharded: {why}")


def _is_cut_unnoticed(
    optimizer_cls: Callable[..., optim.Optimizer], settings: Mapping[str, Any], tensor: Tensor, expected: Tensor
) -> bool:
    """Whether two parts of the flat tensor end as the whole does, and the whole's state is per element."""
    try:
        parts, _ = _trial(optimizer_cls, settings, [tensor], cut=11)
    except Exception:  # it wants matrices, say
        return False
    _, states = _trial(optimizer_cls, settings, [tensor])
    return _all_close([torch.cat(parts)], [expected.flatten()]) and all(
        _is_per_element(value, tensor) for state in states for value in state.values()
    )


def _is_per_element(value: object, parameter: Tensor) -> bool:
    if isinstance(value, Tensor):
        return value.numel() <= 1 or value.shape == parameter.shape
    return value is None or isinstance(value, bool | int | float | str)


def _trial(
    optimizer_cls: Callable[..., optim.Optimizer],
    settings: Mapping[str, Any],
    tensors: list[Tensor],
    cut: int | None = None,
) -> tuple[list[Tensor], list[dict[str, Any]]]:
    """The tensors, or with `cut` the two parts of each, after some steps, and their states."""
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(0)
        gradients = [torch.linspace(0.1, 10, t.numel(), device=t.device).view(t.shape) * t.sign() for t in tensors]
        parameters = [part.clone() for tensor in tensors for part in _parts(tensor, cut)]
        parameters = [torch.nn.Parameter(part) for part in parameters]
        optimizer = optimizer_cls(parameters, **settings)
        for group in optimizer.param_groups:
            if "lr" in group:  # what begins at 0 shows nothing
                lr = group["lr"]
                group["lr"] = torch.full_like(lr, 0.01) if isinstance(lr, Tensor) else 0.01
        for number in range(TRIAL_STEPS):
            scaled = [part * (1 + number) for gradient in gradients for part in _parts(gradient, cut)]
            for parameter, gradient in zip(parameters, scaled, strict=True):
                parameter.grad = gradient.clone()
            optimizer.step()
    return [p.detach() for p in parameters], [dict(optimizer.state.get(p, {})) for p in parameters]


def _parts(tensor: Tensor, cut: int | None) -> list[Tensor]:
    return [tensor] if cut is None else [tensor.flatten()[:cut], tensor.flatten()[cut:]]


def _all_close(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(some, others, strict=True))
