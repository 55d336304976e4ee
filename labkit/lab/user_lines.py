"""A user's models, measured with the named sizes: `lab.measure(models={"mine": mine})`.

    def mine():
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        return model, torch.randn(16, 8, 8), torch.randint(10, (16,)), nn.functional.cross_entropy

A model is a function without arguments that returns (model, inputs, targets, loss), so that
`loss(model(inputs), targets)` is one number; or a `TransformerShape`, measured like the named sizes
with the lab's batches. Ranks call the function with the lab's device as default and seeded: all
have the same parameters, and different random batches. Imports nothing heavy but torch: every rank
loads this module.
"""

import copy
import json
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from labkit.costs.transformer import SIZES, TransformerShape, n_parameters
from labkit.lab.point import MODEL_FIELDS
from labkit.nn.training import ModelAndBatch
from labkit.parallel.ranks.results import is_out_of_memory
from labkit.torch_private import tree_map

if TYPE_CHECKING:
    import pandas as pd

EXPECTED = "a TransformerShape, or a function that returns (model, inputs, targets, loss)"
Model = TransformerShape | Callable[[], Any]
# files of labkit and of Python, and code without a file
NOT_THE_USERS = (str(Path(__file__).parents[1]), sysconfig.get_path("stdlib"), "<frozen")

_models: dict[str, Model] = {}


class ModelError(RuntimeError):
    """Error in a user's model, with the line that raised it."""


@contextmanager
def registered_models(models: Mapping[str, Model]) -> Iterator[None]:
    """Register models by name within the block, next to the named sizes."""
    before = dict(_models)
    _models.update(models)
    try:
        yield
    finally:
        _models.clear()
        _models.update(before)


def model_names() -> tuple[str, ...]:
    """Return names of the named sizes and the user's models."""
    return (*SIZES, *_models)


def find_shape(name: str) -> TransformerShape | None:
    """Return the shape of a named size or of a user's `TransformerShape`; None for other models."""
    model = {**SIZES, **_models}.get(name)
    return model if isinstance(model, TransformerShape) else None


def model_source(name: str) -> TransformerShape | Callable[[], ModelAndBatch]:
    """Return a model for `TrainingStep` and `build_workload`. ValueError for an unknown name."""
    if name not in model_names():
        raise ValueError(f"no model {name!r}; there are {', '.join(model_names())}")
    return find_shape(name) or partial(_call, _models[name])


def count_parameters(name: str) -> int | None:
    """Return the number of parameters of a model; None if it cannot be built on the meta device."""
    shape = find_shape(name)
    if shape is not None:
        return n_parameters(shape)
    try:
        with torch.device("meta"):
            model = _call(_models[name]).model
    except Exception:
        return None
    return sum(parameter.numel() for parameter in model.parameters())


def describe_model(name: str) -> dict[str, Any]:
    """Return the column by which a run of a user's `TransformerShape` can be read without it."""
    model = _models.get(name)
    if not isinstance(model, TransformerShape):
        return {}
    return {"model_shape": json.dumps(asdict(model))}


def recorded_shapes(frame: "pd.DataFrame") -> AbstractContextManager[None]:
    """Register, within the block, the user's Transformers that the rows of a run record."""
    shapes: dict[str, Model] = {}
    for column in MODEL_FIELDS:
        pairs = frame.reindex(columns=[column, "model_shape"]).dropna().drop_duplicates()
        for name, written in pairs.itertuples(index=False):
            shapes[name] = TransformerShape(**json.loads(written))
    return registered_models(shapes)


@contextmanager
def errors_with_line(name: str | None) -> Iterator[None]:
    """Raise errors of a user's model as `ModelError` with its line, but for a lack of memory."""
    try:
        yield
    except Exception as error:
        if name not in _models or is_out_of_memory(error):
            raise
        text = str(error).strip().partition("\n")[0]
        reason = f"{type(error).__name__}: {text}".removesuffix(": ")
        code = getattr(_models[name], "__code__", None)
        where = user_line(error)
        if not where and code is not None:
            place = f"line {code.co_firstlineno} of {_place(code.co_filename)}"
            where = f", in the model made at {place}"
        raise ModelError(f"{reason}{where}") from error


def user_line(error: Exception) -> str:
    """Return the deepest line of a user's code, as ", line 3 of the cell", or ""."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        place = user_file(frame.filename)
        if place:
            return f", line {frame.lineno} of {place}"
    return ""


def user_file(path: str) -> str:
    """Return the name of a user's file, "the cell" for code without one; "" for others' files."""
    if path.startswith(NOT_THE_USERS) or "site-packages" in path:
        return ""
    return _place(path)


def _place(filename: str) -> str:
    return Path(filename).name if Path(filename).is_file() else "the cell"


def _call(make: Any) -> ModelAndBatch:
    """Call a user's function; its result is on the default device and shares nothing."""
    result = make()
    if not isinstance(result, tuple) or len(result) != 4:
        raise ValueError(f"expected (model, inputs, targets, loss), got {_kind(result)}")
    model, inputs, targets, loss = result
    if not isinstance(model, nn.Module):
        raise ValueError(f"expected the model to be an nn.Module, got {_kind(model)}")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            "expected a model with parameters to train, got none that needs a gradient"
        )
    if not callable(loss):
        raise ValueError(
            f"expected the loss to be a function of outputs and targets, got {_kind(loss)}"
        )
    device = torch.get_default_device()

    def moved(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.detach().to(device, copy=True)
        return value

    def one_number(outputs: Any, targets: Any) -> Tensor:
        value = loss(outputs, targets)
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise ValueError(f"expected the loss to be one number, got {_kind(value)}")
        if torch.is_grad_enabled() and not value.requires_grad:
            raise ValueError(
                "expected a loss with a gradient, got one that does not depend on the parameters"
            )
        return value

    # deepcopy cannot copy tensors on a fake device, so these are copied first
    tensors: dict[int, Any] = {
        id(one): nn.Parameter(moved(one), one.requires_grad) for one in model.parameters()
    }
    tensors |= {id(one): moved(one) for one in model.buffers()}
    return ModelAndBatch(
        copy.deepcopy(model, tensors), tree_map(moved, inputs), tree_map(moved, targets), one_number
    )


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return type(value).__name__
