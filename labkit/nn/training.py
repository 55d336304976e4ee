"""Models with a batch: one training step in timed phases, and workloads over ranks.

    step = TrainingStep(SIZES["nano"], batch=4, context_length=128)
    step.forward(); step.backward(); step.optimizer_step()

A step as a whole is `step.run()`.
"""

import copy
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer
from torch.profiler import record_function

from labkit.costs.transformer import TransformerShape
from labkit.nn.transformer import Transformer, language_model_loss
from labkit.nn.vision import ResNet50

AUTOCAST_DTYPES = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}
RESNET50 = "resnet50"
RESNET50_PARAMETERS = 25_557_032
CLASSES = 1000
FORWARD = "forward"
BACKWARD = "backward"
OPTIMIZER = "optimizer"
# Range of the profiler around what a wrapper does after its backward pass.
FINISH = "finish"


class Trainer:
    """One training step in phases that can be timed; `compute_loss(model)` returns a scalar.

    The phases are named ranges for `torch.profiler`, and for Nsight Systems in
    `torch.autograd.profiler.emit_nvtx()`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        compute_loss: Callable[[Any], Tensor],
        device: str = "cpu",
    ):
        self.model: Any = model
        # The model, or a wrapper of it, that `compute_loss` gets.
        self.call: Any = model
        self.optimizer = optimizer
        # The dtype of autocast in forward pass and loss, or None. float16 has no loss scaling.
        self.autocast_dtype: torch.dtype | None = None
        # Makes a context from the end of backward until gradients are averaged. For wrappers that
        # finish apart.
        self.waiting: Callable[[], AbstractContextManager[Any]] = nullcontext
        self._finish: Callable[[], None] | None = getattr(
            model, "finish_gradient_synchronization", None
        )
        self._compute_loss = compute_loss
        self._device_type = torch.device(device).type
        self._loss: Tensor | None = None

    def infer(self) -> Tensor:
        """Run a forward pass without a graph; return the loss, a scalar."""
        with torch.no_grad():
            return self._run_forward()

    def forward(self) -> Tensor:
        """Run a forward pass; keep the loss with its graph until `backward`."""
        self._loss = self._run_forward()
        return self._loss

    def backward(self) -> None:
        """Accumulate the gradients of the last forward pass, until they are averaged over ranks."""
        assert self._loss is not None, "forward comes first"
        with record_function(BACKWARD):
            self._loss.backward()
        self._loss = None
        if self._finish is not None:
            with record_function(FINISH), self.waiting():
                self._finish()

    def optimizer_step(self) -> None:
        """Update the parameters, then drop the gradients."""
        with record_function(OPTIMIZER):
            self.optimizer.step()
            self.optimizer.zero_grad()

    @property
    def phases(self) -> dict[str, Callable[[], Any]]:
        """The phases of a full step by name, in order."""
        return {FORWARD: self.forward, BACKWARD: self.backward, OPTIMIZER: self.optimizer_step}

    def run(self) -> None:
        """Run one full step."""
        for phase in self.phases.values():
            phase()

    def drop_gradients(self) -> None:
        """Drop gradients and a graph that has not had its backward pass."""
        self._loss = None
        self.optimizer.zero_grad()

    def _run_forward(self) -> Tensor:
        dtype = self.autocast_dtype
        with (
            record_function(FORWARD),
            torch.autocast(self._device_type, dtype=dtype, enabled=dtype is not None),
        ):
            return self._compute_loss(self.call)


class TrainingStep(Trainer):
    """A workload in float32 with AdamW, or under autocast to another `precision`.

    `compiled` wraps the model in `torch.compile`; other options are those of `build_workload`.
    ValueError for an unknown precision, and as `build_workload`.
    """

    def __init__(
        self,
        source: "Source",
        *,
        device: str = "cpu",
        precision: str = "float32",
        compiled: bool = False,
        **options: Any,
    ):
        if precision not in AUTOCAST_DTYPES:
            raise ValueError(
                f"expected a precision among {', '.join(AUTOCAST_DTYPES)}, got {precision!r}"
            )
        workload = build_workload(source, device=device, **options)
        model = workload.build()
        super().__init__(
            model, adamw(model.parameters(), torch.device(device)), workload.loss, device
        )
        self.autocast_dtype = AUTOCAST_DTYPES[precision]
        if compiled:
            self.call = torch.compile(model, dynamic=False)


def random_tokens(
    shape: TransformerShape,
    batch: int,
    context_length: int,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Return inputs, and as targets the tokens that follow, each (batch, context_length), int64."""
    # One more than the context, so that the last position has a target, too.
    tokens = torch.randint(shape.vocabulary, (batch, context_length + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def adamw(parameters: Iterable[nn.Parameter], device: torch.device) -> torch.optim.AdamW:
    """Return AdamW with torch's default for `device`: foreach on CUDA, elsewhere one by one."""
    # Left to itself, torch would take lists of real tensors and not of fake ones.
    return torch.optim.AdamW(parameters, lr=1e-4, foreach=device.type == "cuda")


def gradients(module: nn.Module) -> dict[str, Tensor]:
    """Return gradients by parameter name; parameters without one are left out."""
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


@dataclass(frozen=True)
class Workload:
    """A model and a rank's batch.

    `build` returns an equal model each time, on its device; `loss` computes the loss.
    """

    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module], Tensor]

    def copied(self) -> "Workload":
        """Build the model once and copy it from then on."""
        # Drawing parameters takes ten times as long.
        return replace(self, build=partial(copy.deepcopy, self.build()))


Source = TransformerShape | type[ResNet50]


def build_workload(
    source: Source,
    *,
    batch: int,
    context_length: int = 128,
    image_size: int = 224,
    device: str = "cpu",
    seed: int = 0,
    **options: Any,
) -> Workload:
    """Return a Transformer or ResNet-50, and its batch.

    Tokens are (batch, context_length), images (batch, 3, image_size, image_size). `options` are the
    Transformer's. `seed` decides the batch, not the parameters. ValueError for a batch that is not
    positive.
    """
    if batch < 1:
        raise ValueError(f"expected batch >= 1, got {batch}")
    generator = torch.Generator().manual_seed(seed)
    make: Callable[[], nn.Module]
    loss: Callable[[Any, Any], Tensor]
    if isinstance(source, TransformerShape):
        inputs, targets = random_tokens(source, batch, context_length, generator)
        make = partial(Transformer, source, context_length=context_length, **options)
        loss = language_model_loss
    else:
        inputs = torch.randn(batch, 3, image_size, image_size, generator=generator)
        targets = torch.randint(CLASSES, (batch,), generator=generator)
        make = ResNet50
        loss = cross_entropy
    inputs = inputs.to(device)
    targets = targets.to(device)
    return Workload(partial(_build, make, device), lambda model: loss(model(inputs), targets))


def _build(make: Callable[[], nn.Module], device: str) -> nn.Module:
    # On every rank, and for every alternative, the same parameters.
    torch.manual_seed(0)
    with torch.device(device):
        return make()
