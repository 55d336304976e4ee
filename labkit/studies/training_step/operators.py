"""The operators of a training step of a Transformer, by phase: traced on fake tensors, which take no memory or time."""

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache

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
    """Return the operators that each phase of a step calls, in any order; the optimizer's states are there already.

    Traced on the CPU for every device: a torch without CUDA has no backward pass even of fake CUDA tensors. The
    optimizer is the device's.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # not needed by ranks, which import this package

    with FakeTensorMode(allow_non_fake_inputs=True):
        step = TrainingStep(shape, batch=batch, context_length=context_length, precision=precision)
        step.optimizer = adamw(step.model.parameters(), torch.device(device))
        step.run()
        actions = {
            INFERENCE: step.infer,
            FORWARD: step.forward,
            BACKWARD: step.backward,
            OPTIMIZER: step.optimizer_step,
        }
        return {name: record_operators(action) for name, action in actions.items()}


def predict_seconds(rates: Rates, operators: Phases, parts: Iterable[str]) -> float:
    """Predict the seconds of these parts of a step: their operators at the device's rates, under autograd."""
    parts = list(parts)
    passed = sum(len(operators[part]) for part in parts if part in (FORWARD, BACKWARD))
    counts = Counter((one.flops, one.n_bytes, one.dtype) for part in parts for one in operators[part])  # layers repeat
    seconds = sum(count * rates.operator_s(*one) for one, count in counts.items())
    return seconds + rates.autograd_s(passed, begin={FORWARD, BACKWARD} <= set(parts))
