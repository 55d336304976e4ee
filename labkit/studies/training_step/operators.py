"""The operators of a training step of a Transformer, by phase: traced on fake tensors, which take no memory or time."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch

from labkit.bench.operators import OperatorCall, record_operators
from labkit.costs.calibration import Rates
from labkit.costs.transformer import TransformerShape
from labkit.nn.training import TrainingStep, adamw

INFERENCE, FORWARD, BACKWARD, OPTIMIZER = "inference", "forward", "backward", "optimizer"
Phases = Mapping[str, tuple[OperatorCall, ...]]


@cache
def list_operators(
    shape: TransformerShape, batch: int, context_length: int, precision: str = "float32", device: str = "cpu"
) -> Phases:
    """The operators that each phase of a step calls, in any order; the optimizer's states are there already.

    Traced on the CPU for every device: a torch without CUDA has no backward pass even of fake CUDA tensors. The
    optimizer is the device's.
    """
    passes = partial(_trace_passes, batch=batch, context_length=context_length, precision=precision)
    update = partial(_trace_update, device=device)  # depends on neither batch nor precision
    return {**_trace_all_layers(shape, passes), **_trace_all_layers(shape, update)}


def predict_seconds(rates: Rates, operators: Phases, parts: Iterable[str]) -> float:
    """Predict the seconds of these parts of a step: their operators at the device's rates, under autograd."""
    parts = list(parts)
    passed = sum(len(operators[part]) for part in parts if part in (FORWARD, BACKWARD))
    counts = Counter((one.flops, one.n_bytes, one.dtype) for part in parts for one in operators[part])  # layers repeat
    seconds = sum(count * rates.operator_s(*one) for one, count in counts.items())
    return seconds + rates.autograd_s(passed, begin={FORWARD, BACKWARD} <= set(parts))


def _trace_all_layers(shape: TransformerShape, trace: Callable[[TransformerShape], Phases]) -> Phases:
    """Trace one layer and two, and count what the second adds for each other layer, which is alike.

    If all layers are in one call, as in a GPU's optimizer, the whole model is traced.
    """
    one, two = (trace(replace(shape, n_layers=layers)) for layers in (1, 2))
    each = {phase: Counter(two[phase]) - Counter(one[phase]) for phase in one}
    if any(Counter(one[phase]) + each[phase] != Counter(two[phase]) for phase in one):
        return trace(shape)
    return {phase: (*calls, *(shape.n_layers - 1) * tuple(each[phase].elements())) for phase, calls in one.items()}


def _trace_passes(shape: TransformerShape, batch: int, context_length: int, precision: str) -> Phases:
    with _fake():
        step = TrainingStep(shape, batch=batch, context_length=context_length, precision=precision)
        actions = {INFERENCE: step.infer, FORWARD: step.forward, BACKWARD: step.backward}
        return {name: record_operators(action) for name, action in actions.items()}


def _trace_update(shape: TransformerShape, device: str) -> Phases:
    with _fake():
        step = TrainingStep(shape, batch=1, context_length=1)
        step.optimizer = adamw(step.model.parameters(), torch.device(device))
        calls: tuple[OperatorCall, ...] = ()
        for _ in range(2):
            for parameter in step.model.parameters():
                parameter.grad = torch.empty_like(parameter)
            calls = record_operators(step.optimizer_step)
        return {OPTIMIZER: calls}


def _fake() -> AbstractContextManager[Any]:
    from torch._subclasses.fake_tensor import FakeTensorMode  # not needed by ranks, which import this package

    return FakeTensorMode(allow_non_fake_inputs=True)
