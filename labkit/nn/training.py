"""Models with a batch to train on: one training step in timed phases, and workloads for wrappers over ranks.

    step = TrainingStep(shape_named("nano"), batch=4, context_length=128)
    step.forward(); step.backward(); step.optimizer_step()       or  step.run()

The three phases are named ranges ("forward", "backward", "optimizer") for `torch.profiler` and, inside
`torch.autograd.profiler.emit_nvtx()`, for Nsight Systems.
"""

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.profiler import record_function

from labkit.costs.transformer import TransformerShape
from labkit.nn.attention import Attention, naive_attention
from labkit.nn.transformer import Transformer, language_model_loss
from labkit.nn.vision import ResNet50

AUTOCAST_DTYPES: Mapping[str, torch.dtype | None] = {
    "float32": None,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
RESNET50 = "resnet50"
RESNET50_PARAMETERS = 25_557_032
CLASSES = 1000


class Trained(NamedTuple):
    """A model with its batch and loss: `loss(model(inputs), targets)` is a scalar."""

    model: nn.Module
    inputs: Any
    targets: Any
    loss: Callable[[Any, Any], Tensor]


class TrainingStep:
    """A Transformer with parameters in float32, AdamW and one random batch of tokens (B, S).

    `source` may also be a function that builds a model and its batch on the default device; `batch`, `context_length`,
    `attention` and `checkpoint_segment` are then ignored. A `precision` other than "float32" is autocast to that dtype,
    forward and loss; float16 has no loss scaling. `compiled` wraps the model in `torch.compile`. ValueError for an
    unknown precision or sizes that are not positive.
    """

    def __init__(
        self,
        source: TransformerShape | Callable[[], Trained],
        *,
        batch: int,
        context_length: int,
        device: str = "cpu",
        precision: str = "float32",
        attention: Attention = naive_attention,
        checkpoint_segment: int = 0,
        compiled: bool = False,
        seed: int = 0,
    ):
        if precision not in AUTOCAST_DTYPES:
            raise ValueError(f"expected a precision among {', '.join(AUTOCAST_DTYPES)}, got {precision!r}")
        torch.manual_seed(seed)
        self.device = torch.device(device)
        self.autocast_dtype = AUTOCAST_DTYPES[precision]
        with self.device:
            if isinstance(source, TransformerShape):
                if batch < 1:
                    raise ValueError(f"expected batch >= 1, got {batch}")
                options: dict[str, Any] = {"attention": attention, "checkpoint_segment": checkpoint_segment}
                model = Transformer(source, context_length=context_length, **options)
                training = Trained(model, *random_tokens(source, batch, context_length), language_model_loss)
            else:
                training = source()
        self.model: Any = training.model
        self.inputs, self.targets, self._loss_of = training[1:]
        self.call: Callable[[Any], Any] = self.model
        if compiled:
            self.call = torch.compile(self.model, dynamic=False)
        self.optimizer = adamw(self.model.parameters(), self.device)
        self.loss: Tensor | None = None

    def infer(self) -> Tensor:
        """Run a forward pass without a graph; return the loss, a scalar."""
        with torch.no_grad(), record_function("forward"):
            return self._compute_loss()

    def forward(self) -> Tensor:
        """Run a forward pass; keep the loss with its graph until `backward`."""
        with record_function("forward"):
            self.loss = self._compute_loss()
        return self.loss

    def backward(self) -> None:
        """Accumulate the gradients of the last forward pass."""
        assert self.loss is not None, "forward comes first"
        with record_function("backward"):
            self.loss.backward()
        self.loss = None

    def optimizer_step(self) -> None:
        """Update by AdamW, then drop the gradients."""
        with record_function("optimizer"):
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)

    def run(self) -> None:
        """Run one full step."""
        self.forward()
        self.backward()
        self.optimizer_step()

    def drop_gradients(self) -> None:
        """Drop gradients and a graph that has not had its backward pass."""
        self.loss = None
        self.optimizer.zero_grad(set_to_none=True)

    def _compute_loss(self) -> Tensor:
        with torch.autocast(self.device.type, dtype=self.autocast_dtype, enabled=self.autocast_dtype is not None):
            return self._loss_of(self.call(self.inputs), self.targets)


def random_tokens(
    shape: TransformerShape, batch: int, context_length: int, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """Inputs and targets, each (batch, context_length), int64: every target is the input that follows."""
    tokens = torch.randint(shape.vocabulary, (batch, context_length + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def adamw(parameters: Iterable[nn.Parameter], device: torch.device) -> torch.optim.AdamW:
    """AdamW with torch's default for `device`: lists of parameters (foreach) on CUDA, one by one elsewhere.

    Left to itself, torch would take lists of real tensors and not of fake ones.
    """
    return torch.optim.AdamW(parameters, lr=1e-4, foreach=device.type == "cuda")


def gradients(module: nn.Module) -> dict[str, Tensor]:
    """Gradients by parameter name; parameters without one are left out."""
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


@dataclass(frozen=True)
class Workload:
    """A model and a rank's batch: `build` returns an equal model each time, on its device; `loss` computes the loss."""

    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module], Tensor]

    def copied(self) -> "Workload":
        """Build the model once and copy it from then on: drawing parameters takes ten times as long."""
        return replace(self, build=partial(copy.deepcopy, self.build()))


def build_workload(
    source: TransformerShape | Callable[[], Trained] | type[ResNet50],
    *,
    batch: int,
    context_length: int = 128,
    image_size: int = 224,
    device: str = "cpu",
    seed: int = 0,
) -> Workload:
    """A Transformer on tokens (batch, context_length), ResNet-50 on images (batch, 3, image_size, image_size), or the
    model and batch that a function builds on the default device; it is called for every copy of the model.

    `seed` decides the batch, and random numbers in the loss of a function's model; parameters are always the same.
    """
    generator = torch.Generator().manual_seed(seed)
    build: Callable[[], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    if isinstance(source, TransformerShape):
        inputs, targets = random_tokens(source, batch, context_length, generator)
        build, loss = partial(Transformer, source, context_length=context_length), language_model_loss
    elif source is ResNet50:
        inputs = torch.randn(batch, 3, image_size, image_size, generator=generator)
        targets = torch.randint(CLASSES, (batch,), generator=generator)
        build, loss = ResNet50, cross_entropy
    else:
        return _user_workload(cast(Callable[[], Trained], source), device, seed)
    inputs, targets = inputs.to(device), targets.to(device)
    return Workload(partial(_build, build, device), lambda model: loss(model(inputs), targets))


def _user_workload(source: Callable[[], Trained], device: str, seed: int) -> Workload:
    torch.manual_seed(seed)
    with torch.device(device):
        _, inputs, targets, loss = source()

    def compute_loss(model: nn.Module) -> Tensor:
        torch.manual_seed(seed)  # equal dropout in every wrapper
        return loss(model(inputs), targets)

    return Workload(partial(_build, lambda: source().model, device), compute_loss)


def _build(make: Callable[[], nn.Module], device: str) -> nn.Module:
    torch.manual_seed(0)
    with torch.device(device):
        return make()
