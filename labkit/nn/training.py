"""One training step of a Transformer, in the parts that the labs time, trace and weigh.

    step = TrainingStep(shape_named("nano"), batch=4, context_length=128)
    step.forward(); step.backward(); step.optimizer_step()       or  step.run()

The three phases are named ranges ("forward", "backward", "optimizer") for `torch.profiler` and, inside
`torch.autograd.profiler.emit_nvtx()`, for Nsight Systems.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from labkit.costs.transformer import TransformerShape
from labkit.nn.attention import Attention, naive_attention
from labkit.nn.transformer import Transformer, language_model_loss

PHASES = ("forward", "backward", "optimizer")
AUTOCAST_DTYPES: Mapping[str, torch.dtype | None] = {
    "float32": None,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


class Trained(NamedTuple):
    """A model and what it is trained with: `loss(model(inputs), targets)` is a scalar."""

    model: nn.Module
    inputs: Any
    targets: Any
    loss: Callable[[Any, Any], Tensor]


class TrainingStep:
    """A model, AdamW and one batch: of a Transformer a random one of tokens (B, S), with parameters in float32.

    `source` may also be a function that makes a model and its batch on the default device; `batch`, `context_length`,
    `attention` and `checkpoint_segment` are then its own business.
    `precision` other than "float32" is autocast to that dtype, forward and loss (float16 without loss scaling: what
    it does to the gradients is for the caller to look at). `compiled` wraps the model in `torch.compile`.
    ValueError for an unknown precision or sizes that are not positive.
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
        """A forward pass that keeps nothing for a backward pass: the loss, a scalar."""
        with torch.no_grad(), record_function("forward"):
            return self._compute_loss()

    def forward(self) -> Tensor:
        """A forward pass; the loss, with its graph, stays until `backward`."""
        with record_function("forward"):
            self.loss = self._compute_loss()
        return self.loss

    def backward(self) -> None:
        """Gradients of the last forward pass, added to what is there."""
        assert self.loss is not None, "forward comes first"
        with record_function("backward"):
            self.loss.backward()
        self.loss = None

    def optimizer_step(self) -> None:
        """AdamW's update; the gradients are dropped afterwards."""
        with record_function("optimizer"):
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)

    def run(self) -> None:
        """One full step."""
        self.forward()
        self.backward()
        self.optimizer_step()

    def drop_gradients(self) -> None:
        """Forget gradients and any graph that waits for its backward pass."""
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
    """AdamW as it runs by default on `device`: on CUDA on lists of parameters (foreach), elsewhere one by one.

    Said here and not left to torch, which takes lists only of real tensors: a step on fake ones would be another.
    """
    return torch.optim.AdamW(parameters, lr=1e-4, foreach=device.type == "cuda")


def gradients(module: nn.Module) -> dict[str, Tensor]:
    """Gradients by parameter name; parameters without one are left out."""
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
