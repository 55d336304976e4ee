"""Does a parallel training equal one process? A check of your own wrapper, plan or loss.

    def make():                                                on every rank, with one seed
        return Transformer(shape, context_length=64), language_model_loss

    result = verify(make, BucketedDDP, [(tokens, targets)])    a collective
    print(result)                  "equal", or the first parameter that is off, and why

It trains three steps of SGD with momentum, weight decay and clipping: in one process in float64 and
in float32, and on all ranks as `parallelize` says. (Adam would hide a gradient that is p times too
large.) It compares parameters before, every gradient, the loss, the gradient norm, and parameters
after one and after three steps, on each rank.

A result may differ by rounding. How much follows from the two trainings in one process: to first
order an error is the dtype's rounding times a number that depends on the model, and float32 against
float64 shows that number, for each parameter and step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labkit.parallel.context_layout import local_positions
from labkit.parallel.data_parallel.consistency import broadcast
from labkit.parallel.gradients import clip_grad_norm_
from labkit.parallel.losses import mean_loss
from labkit.parallel.messages import gather_json
from labkit.parallel.pipeline import Pipeline
from labkit.parallel.tensor import TensorParallel
from labkit.parallel.transport import Group, member_group
from labkit.parallel.verify_causes import Case, explain_gradient, explain_parameter
from labkit.parallel.verify_training import (
    KINDS,
    SGD_SETTINGS,
    STEPS,
    Batch,
    Key,
    Loss,
    MakeOptimizer,
    Parallel,
    Record,
    derive_tolerances,
    gather_values,
    make_sgd,
    train_parallel,
    train_whole,
)
from labkit.torch_private import DropoutNd

__all__ = ["SGD_SETTINGS", "Parallel", "Verification", "over_sequence", "verify"]

Verdict = Literal["equal", "different", "refused"]


@dataclass(frozen=True)
class Verification:
    """What `verify` found, the same on all ranks; true if the training equals one process."""

    verdict: Verdict
    what: str = ""
    """What is off first: "parameter", "gradient", "loss", "norm" or "dropout"."""
    name: str = ""
    """The parameter that is off first, in the order of the model."""
    step: int = 0
    """After how many steps; 0: before training."""
    rank: int = 0
    error: float = 0.0
    """Largest difference of an element, and what rounding explains; positions that ranks drop
    alike."""
    tolerance: float = 0.0
    n_off: int = 0
    """How many values of this kind are off at this step."""
    cause: str = ""
    untested: list[str] = field(default_factory=list)
    """Parameters whose gradients are zero in one process too."""

    def __bool__(self) -> bool:
        return self.verdict == "equal"

    def __str__(self) -> str:
        if self.verdict != "different":
            return f"{self.verdict}: {self.cause}" if self.cause else self.verdict
        when = "before training" if self.step == 0 else f"in step {self.step}"
        value = f"{self.what} of {self.name}" if self.name else self.what
        others = f" (and {self.n_off - 1} more)" if self.n_off > 1 else ""
        size = f"off by {self.error:.2g}, where rounding explains {self.tolerance:.2g}"
        if self.what == "dropout":
            size = f"{self.error:.0f} positions alike"
        return f"different: {value}{others} {when} on rank {self.rank}, {size}: {self.cause}"


def verify(
    make: Callable[[], tuple[nn.Module, Loss]],
    parallelize: Callable[[Any], nn.Module | Parallel],
    batches: Sequence[Batch],
    *,
    group: Group = None,
    dtype: torch.dtype | None = None,
    optimizer: MakeOptimizer = make_sgd,
) -> Verification:
    """Compare a parallel training with one process. A collective of `group` (None: all ranks).

    `make` returns a model and its loss (outputs, targets) -> mean. `parallelize` gets the model and
    returns a `Parallel`, or a module: a `Pipeline` or `TensorParallel` gets whole batches, another
    one a share of the sequences, as with data parallelism. `batches`: whole ones, (inputs,
    targets), alike on all ranks; with fewer than three they are repeated. `dtype`: of the roughest
    rounding in the training, such as a reduce dtype; None: the model's. Dropout is off while
    results are compared. `optimizer` makes one of parameters, in one process and on all ranks.

    It refuses to pass if nothing was trained, or if a rank's part of a batch changes no gradient.
    """
    members = member_group(group)
    model, loss_function = make()
    start = copy.deepcopy(model)
    broadcast([*start.parameters(), *start.buffers()], members)
    unclipped = train_whole(start, loss_function, batches, torch.float64, optimizer)
    max_norm = unclipped.norms[0] / 2  # so that clipping clips
    exact = train_whole(start, loss_function, batches, torch.float64, optimizer, max_norm)
    rough = train_whole(start, loss_function, batches, torch.float32, optimizer, max_norm)
    case = Case(start, loss_function, batches[0], members.size())
    untested = [name for name, gradient in exact.gradients[0].items() if not gradient.any()]
    if len(untested) == len(exact.gradients[0]):
        reason = "nothing was trained: all gradients are zero, or there are none, in one process"
        return Verification("refused", cause=reason, untested=untested)
    parallel = _as_parallel(parallelize(model), loss_function, members)
    case.split = parallel.split
    # Such a part could be left out by mistake, and the comparison would still pass.
    for rank, gradient in enumerate(case.part_gradients()):
        if not any(part.any() and part.isfinite().all() for part in gradient.values()):
            reason = f"rank {rank}'s part of the batch changes no gradient: it could be left out"
            return Verification("refused", cause=reason)
    first = next(p for p in start.parameters() if p.is_floating_point())
    tolerances = derive_tolerances(exact, rough, dtype or first.dtype)
    record = train_parallel(parallel, batches, members, exact)
    result = _compare(record, exact, tolerances, case, members)
    if result is None:
        result = _check_dropout(parallel, batches[0], members)
    if result is None:
        result = Verification("equal", untested=untested)
    return result


def over_sequence(
    model: nn.Module, group: Group = None, *, layout: str = "zigzag", loss: Any = mean_loss
) -> Parallel:
    """Return a training in which each rank has positions of all sequences: context parallelism.

    `loss(logits, targets, group)` is the mean over all ranks' targets.
    """

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        value: Tensor = loss(model(inputs), targets, group)
        value.backward()
        return value

    def split(x: Tensor, rank: int) -> Tensor:
        positions = local_positions(x.shape[1], group=group, layout=layout, rank=rank)
        return x.index_select(1, positions.to(x.device))

    return Parallel(model=model, step=step, split=split)


def _as_parallel(made: Any, loss_function: Loss, group: dist.ProcessGroup) -> Parallel:
    if isinstance(made, Parallel):
        return made

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        loss = loss_function(made(inputs), targets)
        loss.backward()
        return loss

    def clip(max_norm: float) -> Tensor:
        return clip_grad_norm_(made.parameters(), max_norm, [group])

    if isinstance(made, Pipeline):
        return Parallel(model=made, step=lambda x, t: made.step(x, t, loss_function), clip=clip)
    if isinstance(made, TensorParallel):
        return Parallel(model=made, step=step, clip=clip)
    return Parallel(model=made, step=step, split=lambda x, rank: x.tensor_split(group.size())[rank])


def _compare(
    record: Record,
    exact: Record,
    tolerances: Mapping[Key, float],
    case: Case,
    group: dist.ProcessGroup,
) -> Verification | None:
    """Return what is off first on any rank, with its cause."""
    expected = exact.values()
    actual = record.values()
    aliases = case.aliases()
    # A tied parameter may have either of its names.
    for key, value in list(actual.items()):
        for alias in aliases.get(key.name, ()):
            actual.setdefault(key._replace(name=alias), value)
    off: dict[Key, float] = {}
    for key in {**expected, **actual}:
        error = _difference(actual.get(key), expected.get(key))
        # Not `>`: NaN must be off, too.
        if not error <= tolerances.get(key, 0.0):
            off[key] = error
    by_rank = [
        {Key(*key): error for key, error in items} for items in gather_json([*off.items()], group)
    ]
    # Those that are expected come first of their kind.
    numbers = {key: number for number, key in enumerate(expected)}

    def order(key: Key) -> tuple[int, int, int, str]:
        return key.step, KINDS.index(key.kind), numbers.get(key, len(numbers)), key.name

    off_anywhere = {key for errors in by_rank for key in errors}
    if not off_anywhere:
        return None
    key = min(off_anywhere, key=order)
    errors = {rank: errors[key] for rank, errors in enumerate(by_rank) if key in errors}
    worst = max(errors, key=lambda rank: errors[rank])
    tolerance = tolerances.get(key, 0.0)
    values = gather_values(actual.get(key), expected.get(key), group)
    if key.kind == "gradient":
        right = exact.gradients[key.step - 1]
        cause = explain_gradient(case, key.name, values, right, tolerance)
    elif key.kind == "parameter":
        cause = explain_parameter(case, key.name, values, exact, tolerance, key.step)
    elif key.kind == "norm":
        cause = "gradients are right and their norm is not: it is the local norm of each rank"
    else:
        cause = "gradients are right and the loss is not: it is that of a part, or scaled"
    return Verification(
        "different",
        what=key.kind,
        name=key.name,
        step=key.step,
        rank=worst,
        error=errors[worst],
        tolerance=tolerance,
        n_off=sum(other[:2] == key[:2] for other in off_anywhere),
        cause=cause,
    )


def _difference(actual: Tensor | None, expected: Tensor | None) -> float:
    """Return the largest difference of an element; infinite if one is not there."""
    if actual is None or expected is None or actual.shape != expected.shape:
        return float("inf")
    return float((actual - expected).abs().max()) if actual.numel() else 0.0


def _check_dropout(
    parallel: Parallel, batch: Batch, group: dist.ProcessGroup
) -> Verification | None:
    """Return a difference if ranks drop the same positions of different activations, else None.

    Only where ranks have the same data, so that activations that differ are parts of the same ones.
    """
    modules = [
        (name, module)
        for name, module in parallel.model.named_modules()
        if isinstance(module, DropoutNd) and 0 < module.p < 1
    ]
    if not modules or parallel.split is not None:
        return None
    seen: dict[str, list[Any]] = {}

    def note(name: str, inputs: Tensor, outputs: Tensor) -> None:
        dropped = ((outputs == 0) & (inputs != 0)).flatten()
        seen.setdefault(name, [float(inputs.double().sum()), dropped.tolist()])

    handles = [
        module.register_forward_hook(lambda _, i, o, name=name: note(name, i[0].detach(), o))
        for name, module in modules
    ]
    # One seed, as in a training that seeds all ranks alike: dropout is then equal unless forked.
    torch.manual_seed(0)
    parallel.step(*batch)
    for handle in handles:
        handle.remove()
    by_rank = gather_json(seen, group)
    for name in by_rank[0]:
        first, *others = [one[name] for one in by_rank if name in one]
        for rank, (total, dropped) in enumerate(others, 1):
            if total != first[0] and dropped == first[1] and sum(dropped) > STEPS:
                return Verification(
                    "different",
                    what="dropout",
                    name=name,
                    step=STEPS + 1,
                    rank=rank,
                    error=float(sum(dropped)),
                    n_off=1,
                    cause="ranks drop the same positions of different parts: use fork_seed",
                )
    return None
