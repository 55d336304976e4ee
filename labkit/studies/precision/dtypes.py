"""Which dtype each part of a model has under autocast, read off the running model by hooks.

Two models: the small one of the published exercise (linear, ReLU, layer norm, linear), with torch's `LayerNorm`, and
the Transformer, whose RMSNorm decides by itself in what it computes.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from labkit.nn.training import AUTOCAST_DTYPES
from labkit.nn.transformer import Transformer, language_model_loss, shape_named

MODELS = ("toy model", "Transformer")
QUANTITIES = ("parameters", "first linear", "norm", "logits", "loss", "gradients")


class ToyModel(nn.Module):
    """Rows of 20 features to logits of 5 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(20, 10, bias=False)
        self.norm = nn.LayerNorm(10)
        self.second = nn.Linear(10, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.second(self.norm(torch.relu(self.first(x))))
        return logits


def observed_dtypes(model_name: str, precision: str, *, device: str, seed: int) -> Iterator[dict[str, Any]]:
    """One forward and backward pass; one row per quantity of `QUANTITIES`: the dtype it had (layers: their output)."""
    torch.manual_seed(seed)
    with torch.device(device):
        model, parts, compute_loss = _toy() if model_name == MODELS[0] else _transformer()
    seen: dict[str, Tensor] = {}
    for quantity, module in parts.items():
        module.register_forward_hook(_remember(seen, quantity))
    dtype = AUTOCAST_DTYPES[precision]
    with torch.autocast(torch.device(device).type, dtype=dtype, enabled=dtype is not None):
        seen["loss"] = compute_loss()
    seen["loss"].backward()
    found = {quantity: _names([tensor]) for quantity, tensor in seen.items()}
    found["parameters"] = _names(list(model.parameters()))
    found["gradients"] = _names([p.grad for p in model.parameters() if p.grad is not None])
    for quantity in QUANTITIES:
        yield {"model": model_name, "quantity": quantity, "observed": found[quantity]}


def _toy() -> tuple[nn.Module, dict[str, nn.Module], Callable[[], Tensor]]:
    model = ToyModel()
    x, classes = torch.randn(8, 20), torch.randint(5, (8,))
    parts = {"first linear": model.first, "norm": model.norm, "logits": model.second}
    return model, parts, lambda: nn.functional.cross_entropy(model(x), classes)


def _transformer() -> tuple[nn.Module, dict[str, nn.Module], Callable[[], Tensor]]:
    shape = shape_named("nano")
    model = Transformer(shape, context_length=16)
    tokens, targets = torch.randint(shape.vocabulary, (2, 2, 16)).unbind()
    layer = model.get_submodule("layers.0")
    parts = {
        "first linear": layer.get_submodule("attention.queries"),
        "norm": layer.get_submodule("attention_norm"),
        "logits": model.output,
    }
    return model, parts, lambda: language_model_loss(model(tokens), targets)


def _remember(seen: dict[str, Tensor], quantity: str) -> Callable[[nn.Module, Any, Tensor], None]:
    def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
        seen[quantity] = output

    return hook


def _names(tensors: list[Tensor]) -> str:
    """The dtypes that occur, "float32" or "bfloat16, float32"."""
    return ", ".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors}))
