"""Why a gradient or parameter of a parallel training is off: known patterns, tried one by one.

Each pattern is a gradient that a known mistake gives, computed in one process in float64. A cause
is named only if the ranks' gradients equal it, and are much nearer to it than to the right ones.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from labkit.parallel.losses import next_tokens
from labkit.parallel.verify_training import Record, update_parts
from labkit.torch_private import DropoutNd

UNKNOWN = "no known pattern"
# A pattern explains an error if it leaves less than this share of it. In 16 bits all patterns may
# be within rounding.
MAX_LEFT = 0.25
# Ranks differ if what they have in common leaves more than this share of the error.
MAX_ALIKE = 0.01
FORWARD = (
    "stale, missing or reordered activations of other ranks: a part of the sequence attends to"
    " another block than it should"
)


class Case:
    """The first step in one process, and what it would be with parts of the batch only."""

    def __init__(
        self, start: nn.Module, loss_function: Any, batch: tuple[Tensor, Tensor], ranks: int
    ) -> None:
        self.model = copy.deepcopy(start).double()
        for module in self.model.modules():
            if isinstance(module, DropoutNd):
                module.p = 0.0
        self.loss_function = loss_function
        inputs, targets = batch
        self.inputs = inputs.double() if inputs.is_floating_point() else inputs
        self.targets = targets.double() if targets.is_floating_point() else targets
        self.ranks = ranks
        self.split: Callable[[Tensor, int], Tensor] | None = None

    @cached_property
    def places(self) -> list[Tensor]:
        """Where each rank's targets are among all, flattened; empty if all ranks have all."""
        if self.split is None:
            return []
        numbers = torch.arange(self.targets.numel()).view(self.targets.shape)
        return [self.split(numbers, rank).flatten() for rank in range(self.ranks)]

    @property
    def cuts_sequence(self) -> bool:
        """Whether ranks have parts of each sequence, not whole sequences."""
        if self.split is None:
            return False
        return self.split(self.targets, 0).shape[1:] != self.targets.shape[1:]

    def gradients(self, loss: Tensor) -> dict[str, Tensor]:
        """Return the gradient of every parameter, zero where it has none."""
        named = dict(self.model.named_parameters(remove_duplicate=False))
        trained = {name: p for name, p in named.items() if p.requires_grad}
        if not loss.requires_grad:
            return {name: torch.zeros_like(p) for name, p in trained.items()}
        grads = torch.autograd.grad(loss, [*trained.values()], allow_unused=True)
        return {
            name: torch.zeros_like(p) if grad is None else grad
            for (name, p), grad in zip(trained.items(), grads, strict=True)
        }

    def part_gradients(self) -> list[dict[str, Tensor]]:
        """Return the gradients of the loss of each rank's part, after one forward pass of all."""
        results = []
        for places in self.places:
            outputs = self.model(self.inputs)
            flat = outputs.flatten(0, self.targets.dim() - 1)
            if flat.shape[0] != self.targets.numel():
                return []
            part, targets = flat[places], self.targets.flatten()[places]
            if outputs.dim() == 3 and self.targets.dim() == 2:  # a language model's loss
                part, targets = part.unsqueeze(0), targets.unsqueeze(0)
            results.append(self.gradients(self.loss_function(part, targets)))
        return results

    def shifted_after_split(self) -> Iterator[dict[str, Tensor]]:
        """Yield gradients with targets that each rank made from its part of the tokens."""
        tokens = self.inputs
        is_text = tokens.shape == self.targets.shape and tokens.dtype == torch.int64
        if not is_text or not self.places:
            return
        for shift in (next_tokens, lambda part: part.roll(-1, 1)):
            targets = self.targets.clone()
            for rank, places in enumerate(self.places):
                assert self.split is not None
                targets.view(-1)[places] = shift(self.split(tokens, rank)).flatten()
            yield self.gradients(self.loss_function(self.model(tokens), targets))

    def aliases(self) -> dict[str, list[str]]:
        """Return the other names of each tied parameter."""
        names: dict[nn.Parameter, list[str]] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            names.setdefault(parameter, []).append(name)
        return {
            name: [other for other in group if other != name]
            for group in names.values()
            for name in group
            if len(group) > 1
        }

    def uses_of_tied(self, name: str) -> dict[str, Tensor]:
        """Return the gradient of each use of a tied parameter alone, by its name there."""
        names = [name, *self.aliases().get(name, [])]
        untied = copy.copy(self)
        untied.model = copy.deepcopy(self.model)
        for each in names:
            path, _, attribute = each.rpartition(".")
            module = untied.model.get_submodule(path)
            old = getattr(module, attribute)
            setattr(module, attribute, nn.Parameter(old.detach().clone()))
        loss = untied.loss_function(untied.model(untied.inputs), untied.targets)
        grads = untied.gradients(loss)
        return {each: grads[each] for each in names}


def explain_gradient(
    case: Case,
    name: str,
    values: Sequence[Tensor | None],
    expected: dict[str, Tensor],
    tolerance: float,
) -> str:
    """Return the cause of ranks' values of a gradient that are off."""
    right = expected.get(name)
    if right is None:
        return "it has a gradient, and none in one process: zeros in its place are decayed"
    actual = [value for value in values if value is not None]
    if len(actual) < len(values):
        missing = [rank for rank, value in enumerate(values) if value is None]
        return f"ranks {missing} have no gradient"
    if not all(value.isfinite().all() for value in actual):
        return "not finite: a part of the batch without targets has no mean"
    within = 4 * case.ranks * tolerance  # a sum of ranks' rounding
    # The rank that is off most: another one may be right.
    worst = max(actual, key=lambda value: float((value - right).norm()))
    cause = _explain_differences(case, name, actual, worst, right, within)
    return cause or _explain_value(case, name, worst, right, within)


def _equal(a: Tensor, b: Tensor, within: float) -> bool:
    return bool((a - b).abs().max() <= within)


def _explains(pattern: Tensor, value: Tensor, right: Tensor, within: float) -> bool:
    """Return whether a value is what a mistake gives, and no rounding of the right one."""
    left = (value - pattern).norm()
    return _equal(value, pattern, within) and bool(left < MAX_LEFT * (value - right).norm())


def _explain_differences(
    case: Case,
    name: str,
    actual: Sequence[Tensor],
    worst: Tensor,
    right: Tensor,
    within: float,
) -> str:
    """Return why ranks have different gradients of a parameter that they all have; "" if they have
    the same ones. `worst`: the value that is off most."""
    total = torch.stack(list(actual)).sum(0)
    mean = total / case.ranks
    off = (worst - right).norm()
    if (worst - mean).norm() > MAX_ALIKE * off:
        # The mean of p ranks' rounding is sqrt(1/p) of it.
        most = min(MAX_LEFT, 0.5 / case.ranks**0.5) * off
        if _equal(mean, right, within) and (mean - right).norm() < most:
            return "not averaged: each rank has its local gradient, and their mean is right"
        # If all ranks have a p-th of the right gradient, but for rounding, their sum is right, too.
        share_off = (case.ranks * worst - right).norm()
        if _equal(total, right, within) and (total - right).norm() < min(
            most, MAX_LEFT * share_off
        ):
            return "not summed: each rank has its part of the gradient, and their sum is right"
        for cause, gradient in _tied_faults(case, name):
            if any(_explains(gradient, value, right, within) for value in actual):
                return cause
    if all(_equal(value, actual[0], within) for value in actual):
        return ""
    if name in case.aliases():
        return "ranks differ in a tied parameter"
    return "drift: ranks differ in what they should have alike"


def _explain_value(case: Case, name: str, value: Tensor, right: Tensor, within: float) -> str:
    """Return why all ranks have the same wrong gradient."""
    left = {
        cause: float((value - gradient).norm())
        for cause, gradient in _known_faults(case, name, right)
        if _explains(gradient, value, right, within)
    }
    # The first of those that fit alike: it explains more parameters.
    for cause, size in left.items():
        if size <= 2 * min(left.values()):
            return cause
    factor = float((value * right).sum() / right.square().sum())
    if _explains(right * factor, value, right, within):
        return f"{factor:.4g} times as large as in one process"
    if case.cuts_sequence:
        return FORWARD
    places = _wrong_places(value, right, within)
    return f"{UNKNOWN}; wrong at {places}"


def _known_faults(case: Case, name: str, right: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield each known fault that gives all ranks one gradient, with this gradient.

    Those that explain more parameters come first.
    """
    p = case.ranks
    yield "zeros: nothing of the loss arrives", torch.zeros_like(right)
    yield f"times {p}: summed over the ranks, and not divided by their number", right * p
    yield f"divided by {p}: averaged twice, or the mean of a part and of nothing", right / p
    parts = [part[name] for part in case.part_gradients()]
    if parts:
        means = torch.stack(parts).sum(0)
        yield (
            "mean of means: ranks have different numbers of targets; add sums and counts",
            means / p,
        )
        for rank, part in enumerate(parts):
            cause = f"rank {rank}'s part of the batch is left out"
            yield cause, (means - part) / p
            if p > 1:
                yield cause, (means - part) / (p - 1)
    for shifted in case.shifted_after_split():
        cause = "labels are shifted after the split: wrong at the borders of the parts"
        yield cause, shifted[name]
    yield from _tied_faults(case, name)


def _tied_faults(case: Case, name: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the gradients of a tied parameter's single uses."""
    if name not in case.aliases():
        return
    for use, gradient in case.uses_of_tied(name).items():
        cause = f"tied weights summed once: a rank has the gradient of its use as {use} only"
        yield cause, gradient


def explain_parameter(
    case: Case,
    name: str,
    values: Sequence[Tensor | None],
    exact: Record,
    tolerance: float,
    step: int,
) -> str:
    """Return the cause of ranks' values of a parameter that are off."""
    expected = exact.parameters[step].get(name)
    if expected is None or any(value is None for value in values):
        return "it is not in one of the two models"
    actual = [value for value in values if value is not None]
    differ = any((value - actual[0]).abs().max() > tolerance for value in actual)
    parameter = case.model.get_parameter(name)
    if not parameter.requires_grad:
        return "a frozen parameter moved: zeros in the place of no gradient are decayed"
    if step == 0:
        wrong_slice = _find_wrong_slice(actual[0], expected, case.ranks)
        if wrong_slice:
            return wrong_slice
        return "ranks start with different values" if differ else "it starts with other values"
    if differ:
        return "drift: ranks differ in what they should have alike"
    for dim in range(expected.dim()):
        if _equal(
            actual[0], update_parts(exact, name, dim, case.ranks, step), 4 * case.ranks * tolerance
        ):
            return (
                "each rank's optimizer sees a part of it: expected one that treats each element"
                " alone, as SGD and Adam do, not as Muon and Adafactor"
            )
    return "gradients are right and the update is not: clipping, decay, or another optimizer"


def _find_wrong_slice(value: Tensor, expected: Tensor, ranks: int) -> str:
    """Return which rank's part of a parameter has the values of another part, if one has."""
    for dim in range(expected.dim()):
        parts = expected.tensor_split(ranks, dim)
        for i, part in enumerate(value.tensor_split(ranks, dim)):
            for j, other in enumerate(parts):
                if i != j and torch.equal(part, other) and not torch.equal(part, parts[i]):
                    return f"a wrong slice: part {i} has the values of part {j}"
    return ""


def _wrong_places(value: Tensor, right: Tensor, within: float) -> str:
    error = (value - right).abs()
    # Less than `within` can be off, too: that is a sum of several ranks' rounding.
    wrong = error > min(within, float(error.max()) / 2)
    if wrong.all():
        return "all elements"
    is_wrong_row = wrong.flatten(1).any(1) if wrong.dim() > 1 else wrong
    rows = is_wrong_row.nonzero().flatten().tolist()
    return f"{len(rows)} of {len(wrong)} rows, from {rows[0]} to {rows[-1]}"
