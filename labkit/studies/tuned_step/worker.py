"""What every rank runs to compare the joined configuration of a training step with the default."""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from labkit.bench.check import largest_difference, max_over_ranks, verdict
from labkit.costs.memory import peak_bytes
from labkit.costs.transformer import SIZES, n_parameters
from labkit.lab.point import TimedPoint
from labkit.nn.attention_implementations import attention_named
from labkit.nn.training import AUTOCAST_DTYPES, adamw, gradients
from labkit.nn.transformer import Transformer, language_model_loss, shape_named
from labkit.parallel.data_parallel import wrap
from labkit.parallel.ranks.worker import use_device
from labkit.studies.shared.alternatives import Failed, run_guarded, timed_rows
from labkit.studies.shared.compiler import prepare_compiler
from labkit.studies.shared.gradient_check import check_completeness

if TYPE_CHECKING:
    from labkit.machine import Machine

DEFAULT_NAME, JOINED = "default", "joined"
TORCH = "torch"
"""The wrapper of the default."""
# Relative to the largest gradient of a tensor: differences from the order of sums, or from 8 significant bits.
FLOAT32_TOLERANCE = 1e-3
HALF_TOLERANCE = 5e-2


@dataclass(frozen=True, kw_only=True)
class TunedStepPoint(TimedPoint):
    """A model, and the joined configuration that is compared with the default one."""

    model: str
    precision: str
    attention: str
    compiled: bool
    wrapper: str
    device: str = "cpu"
    batch: int = 2
    context_length: int = 128

    @property
    def is_default(self) -> bool:
        """Whether the joined configuration changes nothing; on one rank there is no wrapper."""
        is_plain = self.precision == "float32" and self.attention == "explicit" and not self.compiled
        return is_plain and (self.world_size == 1 or self.wrapper == TORCH)

    @property
    def series(self) -> tuple[Hashable, float]:
        return self.world_size, n_parameters(SIZES[self.model])

    def skip_reason(self, machine: "Machine") -> str | None:
        if self.is_default:
            return "the newest runs of the other labs here recommend nothing but the default: measure them first"
        return super().skip_reason(machine)

    @property
    def needed_bytes(self) -> float:
        return 2 * peak_bytes(SIZES[self.model], self.batch, self.context_length, phase="full_step")

    def title(self) -> str:
        return f"{super().title()}, {self.model}"


class Training:
    """A Transformer and AdamW under one configuration; on several ranks under a data-parallel wrapper."""

    def __init__(self, point: TunedStepPoint, name: str, device: str) -> None:
        is_joined = name == JOINED
        torch.manual_seed(point.seed)
        with torch.device(device):
            attend = attention_named(point.attention if is_joined else "explicit").attend
            self.model = Transformer(shape_named(point.model), context_length=point.context_length, attention=attend)
        self.call: Callable[[Tensor], Tensor] = self.model
        self.device = torch.device(device)
        self.autocast = AUTOCAST_DTYPES[point.precision] if is_joined else None
        self.optimizer = adamw(self.model.parameters(), self.device)
        tokens = _tokens(point).to(self.device)
        self.inputs, self.targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        if is_joined and point.compiled:
            prepare_compiler(self.device.type)
            self.model.compile(dynamic=False)
        if point.world_size > 1:
            self.call = wrap(point.wrapper if is_joined else TORCH, self.model)

    def passes(self) -> None:
        with torch.autocast(self.device.type, dtype=self.autocast, enabled=self.autocast is not None):
            loss = language_model_loss(self.call(self.inputs), self.targets)
        loss.backward()

    def step(self) -> None:
        self.passes()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def _tokens(point: TunedStepPoint) -> Tensor:
    """This rank's batch, the same for both configurations."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    generator = torch.Generator().manual_seed(point.batch_seed(rank))
    return torch.randint(
        shape_named(point.model).vocabulary, (point.batch, point.context_length + 1), generator=generator
    )


def measure(point: TunedStepPoint) -> Iterator[dict[str, Any]]:
    """Seconds of a step by configuration, in turns; if their gradients differ, the reason instead."""
    device = use_device(point.device)
    trainings, row = {DEFAULT_NAME: Training(point, DEFAULT_NAME, device)}, {"implementation": JOINED}

    def compare() -> tuple[float, str]:
        trainings[JOINED] = Training(point, JOINED, device)
        return _check(trainings, FLOAT32_TOLERANCE if point.precision == "float32" else HALF_TOLERANCE)

    result = run_guarded(JOINED, compare, device=device)
    if isinstance(result, Failed):
        yield row | {"check": result.reason}
        return
    error, check = result
    if check != "ok":
        yield row | {"check": check, "error": error}
        return
    before = dist.barrier if dist.is_initialized() else None
    rows = {name: {"implementation": name, "error": error, "check": check} for name in trainings}
    steps = {name: training.step for name, training in trainings.items()}
    yield from timed_rows(rows, steps, device=device, before=before, **point.rounds)


def _check(trainings: dict[str, Training], tolerance: float) -> tuple[float, str]:
    """Compare the gradients of a first step: the largest difference of any rank, and "ok" or what is wrong.

    In 16 bits a mean without one of many ranks could be within the tolerance, so its completeness is checked, too.
    """
    is_job = dist.is_initialized()
    both = []
    for training in trainings.values():
        training.passes()
        both.append({name: gradient.clone() for name, gradient in gradients(training.model).items()})
        training.optimizer.zero_grad(set_to_none=True)
    error = largest_difference(both[1], both[0])
    error = max_over_ranks(error) if is_job else error
    check = verdict(error, tolerance)
    if check == "ok" and is_job and dist.get_world_size() > 1:
        checks = [check_completeness(dict(one.model.named_parameters()), one.passes) for one in trainings.values()]
        check = next((one for one in checks if one != "ok"), "ok")
    return error, check
