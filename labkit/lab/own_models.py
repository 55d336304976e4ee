"""Models of a reader's own, measured beside the named sizes: `lab.measure(models={"mine": mine})`.

    def mine():
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        return model, torch.randn(16, 8, 8), torch.randint(10, (16,)), nn.functional.cross_entropy

A model is a function without arguments that returns (model, inputs, targets, loss), so that `loss(model(inputs),
targets)` is one number; or a `TransformerShape`, which is measured like the named sizes, with the lab's batches. Ranks
call the function with the lab's device as the default one, and seeded: all have the same parameters, and a random batch
is another one on each. Imports nothing heavy but torch: every rank loads this module.
"""

import copy
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from labkit.costs.transformer import SIZES, TransformerShape, n_parameters
from labkit.nn.training import Trained
from labkit.parallel.ranks.results import is_out_of_memory

if TYPE_CHECKING:
    import pandas as pd

EXPECTED = "a TransformerShape, or a function that returns (model, inputs, targets, loss)"
Model = TransformerShape | Callable[[], Any]
MODEL_FIELDS = ("size", "model", "workload")
"""Fields of points that name a model."""
# Files of labkit, of Python, and those without a file.
NOT_A_READERS = (str(Path(__file__).parents[1]), sysconfig.get_path("stdlib"), "<frozen")

_known: dict[str, Model] = {}


class ModelError(RuntimeError):
    """What a reader's model raised, with the line that it was raised at."""


@contextmanager
def known_models(models: Mapping[str, Model]) -> Iterator[None]:
    """Within, these are models by name, as the named sizes are."""
    before = dict(_known)
    _known.update(models)
    try:
        yield
    finally:
        _known.clear()
        _known.update(before)


def model_names() -> tuple[str, ...]:
    """The named sizes, and the models that a reader has given."""
    return (*SIZES, *_known)


def own_names() -> tuple[str, ...]:
    """The models that a reader has given."""
    return tuple(_known)


def in_model_order(names: Iterable[str]) -> list[str]:
    """Each once: the named sizes from small to large, then a reader's own."""
    return sorted(set(names), key=model_names().index)


def shape_of(name: str) -> TransformerShape | None:
    """Of a named size, or of a reader's; None of a model that is no Transformer of labkit's."""
    model = {**SIZES, **_known}.get(name)
    return model if isinstance(model, TransformerShape) else None


def source_of(name: str) -> TransformerShape | Callable[[], Trained]:
    """What `TrainingStep` and `workload_of` make a model from, by its name. ValueError if there is none."""
    if name not in (names := model_names()):
        raise ValueError(f"no model {name!r}; there are {', '.join(names)}")
    return shape_of(name) or partial(_made, _known[name])


def parameters_of(name: str) -> int | None:
    """Parameters of a model; None of one that can't be made on the meta device: they are unknown until it is made."""
    if (shape := shape_of(name)) is not None:
        return n_parameters(shape)
    try:
        with torch.device("meta"):
            model = _made(_known[name]).model
    except Exception:
        return None
    return sum(parameter.numel() for parameter in model.parameters())


def facts_of(name: str) -> dict[str, Any]:
    """Columns of the rows of a reader's model, from which a run is read where the model is not at hand."""
    if name not in _known:
        return {}
    shape = shape_of(name)
    written = ", ".join(f"{field}={value}" for field, value in asdict(shape).items()) if shape else None
    return {"is_own_model": True, "model_shape": written}


def models_in(frame: "pd.DataFrame") -> AbstractContextManager[None]:
    """Within, a reader's shapes are known that the rows of a run tell: of other models nothing can be computed."""
    own: dict[str, Model] = {}
    for column in {*MODEL_FIELDS} & {*frame.columns} if "model_shape" in frame else ():
        for name, written in frame[[column, "model_shape"]].dropna().drop_duplicates().itertuples(index=False):
            fields = (field.split("=") for field in written.split(", "))
            own[name] = TransformerShape(**{field: int(value) for field, value in fields})
    return known_models(own)


def without_own(frame: "pd.DataFrame") -> "pd.DataFrame":
    """The rows of the named sizes."""
    return frame[frame["is_own_model"].isna()] if "is_own_model" in frame else frame


@contextmanager
def told_where(name: str | None) -> Iterator[None]:
    """What a reader's model raises within is told with its line, or with that of the function if it has none.

    What runs out of memory is left as it is.
    """
    try:
        yield
    except Exception as error:
        if name not in _known or is_out_of_memory(error):
            raise
        text = str(error).strip().partition("\n")[0]
        told = f"{type(error).__name__}: {text}".removesuffix(": ")
        raise ModelError(f"{told}{readers_line(error) or _line_of(_known[name])}") from error


def readers_line(error: Exception) -> str:
    """ ", line 3 of the cell", or of a file: the deepest line that is neither labkit's nor installed; or nothing."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if place := readers_file(frame.filename):
            return f", line {frame.lineno} of {place}"
    return ""


def readers_file(path: str) -> str:
    """What a file is called that is neither labkit's nor installed, "the cell" if it is none; "" for others."""
    return "" if path.startswith(NOT_A_READERS) or "site-packages" in path else _place(path)


def _line_of(model: Model) -> str:
    code = getattr(model, "__code__", None)
    return f", in the model made at line {code.co_firstlineno} of {_place(code.co_filename)}" if code else ""


def _place(filename: str) -> str:
    return Path(filename).name if Path(filename).is_file() else "the cell"


def _made(make: Any) -> Trained:
    """What a reader's function returns, on the default device, none of it shared with what it returned before."""
    made = make()
    if not isinstance(made, tuple) or len(made) != 4:
        raise ValueError(f"expected (model, inputs, targets, loss), got {_kind(made)}")
    model, inputs, targets, loss = made
    if not isinstance(model, nn.Module):
        raise ValueError(f"expected the model to be an nn.Module, got {_kind(model)}")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("expected a model with parameters to train, got none that needs a gradient")
    if not callable(loss):
        raise ValueError(f"expected the loss to be a function of outputs and targets, got {_kind(loss)}")
    device = torch.get_default_device()

    def moved(value: Any) -> Any:
        return value.detach().to(device, copy=True) if isinstance(value, Tensor) else value

    def one_number(outputs: Any, targets: Any) -> Tensor:
        found = loss(outputs, targets)
        if not isinstance(found, Tensor) or found.numel() != 1:
            raise ValueError(f"expected the loss to be one number, got {_kind(found)}")
        if torch.is_grad_enabled() and not found.requires_grad:
            raise ValueError("expected a loss with a gradient, got one that does not depend on the parameters")
        return found

    # a copy of everything around tensors that are copied here: those on a fake device can be in no other way
    tensors: dict[int, Any] = {id(one): nn.Parameter(moved(one), one.requires_grad) for one in model.parameters()}
    tensors |= {id(one): moved(one) for one in model.buffers()}
    return Trained(copy.deepcopy(model, tensors), tree_map(moved, inputs), tree_map(moved, targets), one_number)


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a tuple of {len(value)}" if isinstance(value, tuple) else f"{type(value).__name__}"
