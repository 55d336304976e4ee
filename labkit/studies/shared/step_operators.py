"""The operators of a training step of a Transformer, by phase: traced on fake tensors, which take no memory or time."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from labkit.bench.operators import OperatorCall, operators_of
from labkit.costs.transformer import TransformerShape
from labkit.nn.training import TrainingStep, adamw

INFERENCE, FORWARD, BACKWARD, OPTIMIZER = "inference", "forward", "backward", "optimizer"
Phases = Mapping[str, tuple[OperatorCall, ...]]


@cache
def step_operators(
    shape: TransformerShape, batch: int, context_length: int, precision: str = "float32", device: str = "cpu"
) -> Phases:
    """What each phase of a step calls, in any order, from the second step on: the first makes the optimizer's states.

    Layers are alike: one and two of them are traced, which takes a fraction of the time of all, and what the second one
    adds is taken for each of the others. Where all layers are in one call, as in a GPU's optimizer, the whole model is
    traced.
    """
    how = (batch, context_length, precision, device)
    one, two = (_traced(replace(shape, n_layers=layers), *how) for layers in (1, 2))
    each = {phase: Counter(two[phase]) - Counter(one[phase]) for phase in one}
    if any(Counter(one[phase]) + each[phase] != Counter(two[phase]) for phase in one):
        return _traced(shape, *how)
    return {phase: (*calls, *(shape.n_layers - 1) * tuple(each[phase].elements())) for phase, calls in one.items()}


def _traced(shape: TransformerShape, batch: int, context_length: int, precision: str, device: str) -> Phases:
    """Traced on the CPU, whatever the device, so that a page is the same wherever it is drawn: a torch without CUDA has
    no backward pass even of fake tensors there. The optimizer is that of the device.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # not needed by ranks, who import this package

    with FakeTensorMode(allow_non_fake_inputs=True):
        step = TrainingStep(shape, batch=batch, context_length=context_length, precision=precision, device="cpu")
        step.optimizer = adamw(step.model.parameters(), torch.device(device))
        step.run()
        actions: dict[str, Callable[[], Any]] = {
            INFERENCE: step.infer,
            FORWARD: step.forward,
            BACKWARD: step.backward,
            OPTIMIZER: step.optimizer_step,
        }
        return {name: operators_of(action) for name, action in actions.items()}
