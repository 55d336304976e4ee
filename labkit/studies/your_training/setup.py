"""A reader's training: a function that returns the model, batches, loss and optimizer.

    def setup(batch=8):
        model = ...
        loader = DataLoader(dataset, batch_size=batch)
        return model, loader, loss, torch.optim.AdamW(model.parameters())

    loss(model, batch)      # one number that depends on the parameters

It is named "train.py:setup". The file is imported under its own name, with its folder on the path
and without arguments, so `if __name__ == "__main__":` stays silent and argparse sees defaults.
"""

import importlib.util
import inspect
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from labkit.lab.project import kind_of_path
from labkit.machine.user_lines import DescribedError, deepest_user_line
from labkit.parallel.ranks.results import is_out_of_memory
from labkit.torch_private import tree_leaves

Loss = Callable[[Any, Any], Tensor]
FUNCTION = "setup"
RETURNS = "(model, batches, loss) or (model, batches, loss, optimizer)"


class SetupError(DescribedError):
    """What is wrong with a setup, in one line, with the line of the user's file if there is one."""


@dataclass
class Training:
    """What a setup returned. `batches` may be iterated again and again."""

    model: nn.Module
    batches: Iterable[Any]
    loss: Loss
    optimizer: Optimizer
    has_own_optimizer: bool = True
    """False: the setup returned none, and AdamW with torch's defaults stands in for it."""

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return next(self.model.parameters()).device

    def forever(self) -> Iterator[Any]:
        """Yield batches, from the first again once they run out. SetupError if there are none."""
        n_epochs = 0
        while True:
            n_batches = 0
            for batch in self.batches:
                n_batches += 1
                yield batch
            if n_batches == 0 and n_epochs == 0:
                raise SetupError("expected batches, and there are none")
            if n_batches == 0:
                raise SetupError(
                    "expected batches that can be iterated again, and they ran out in epoch"
                    f" {n_epochs}: return a list or a DataLoader, not a generator"
                )
            n_epochs += 1


def absolute_target(target: str) -> str:
    """Name a setup with the absolute path of its file: ranks run in other folders."""
    path, _, name = target.partition(":")
    file = Path(path)
    with suppress(RuntimeError):  # a home folder of nobody: the file will be missing
        file = file.expanduser()
    return f"{file.absolute()}:{name or FUNCTION}"


def setup_file(target: str) -> Path:
    """Return the file of a setup. SetupError if there is none."""
    path = target.partition(":")[0]
    if kind_of_path(path) != "file":
        raise SetupError(f"expected FILE.py:FUNCTION, and there is no file {path[-80:]!r}")
    return Path(path)


def load_setup(target: str) -> Callable[..., Any]:
    """Import the function that "train.py:setup" names; "train.py" is short for that.

    SetupError for a file that is missing or raises while it is imported, and for a name that is no
    function.
    """
    path = setup_file(target)
    module = _import(path.resolve())
    name = target.partition(":")[2]
    function = getattr(module, name or FUNCTION, None)
    if not inspect.isfunction(function):
        functions = [
            one
            for one, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__
        ]
        there = f"its functions are {', '.join(functions[:8])}" if functions else "it has none"
        raise SetupError(f"{path.name} has no function {name or FUNCTION}; {there}")
    return function


def _import(path: Path) -> Any:
    """Import a file under its own name, as its own folder would; once per process."""
    name = path.stem
    loaded = sys.modules.get(name)
    # Running it once more would make its classes anew, and instances of the old ones would not fit.
    if loaded is not None and getattr(loaded, "__file__", None) == str(path):
        return loaded
    # In its place, the file would change what other modules have imported: random.py, say.
    if loaded is not None:
        raise SetupError(f"{path.name}: a module named {name} is loaded already: rename the file")
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise SetupError(f"expected a Python file, got {path.name}")
    module = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    sys.modules[name] = module  # before it runs: pickles and dataclasses look it up there
    # A script's argparse would read labkit's own arguments.
    arguments = sys.argv
    sys.argv = [str(path)]
    try:
        with errors_in_one_line(f"importing {path.name}"):
            spec.loader.exec_module(module)
    except SetupError:
        del sys.modules[name]
        raise
    finally:
        sys.argv = arguments
    return module


@contextmanager
def errors_in_one_line(what: str) -> Iterator[None]:
    """Raise what the user's code raises as SetupError with its line; out of memory passes."""
    try:
        yield
    except SetupError:
        raise
    except (Exception, SystemExit) as error:
        # Its row says "oom": it is no mistake of the setup's.
        if isinstance(error, Exception) and is_out_of_memory(error):
            raise
        text = str(error).strip().partition("\n")[0][:200]
        name = "it exits" if isinstance(error, SystemExit) else type(error).__name__
        reason = f"{name}: {text}".removesuffix(": ")
        raise SetupError(f"{_last_user_line(error) or what}: {reason}") from error


def _last_user_line(error: BaseException) -> str:
    """Return the deepest line of the user's code, "train.py:31"; "" if there is none."""
    # A file with a syntax error has not run, and stands in no frame.
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name}:{error.lineno}"
    file, number = deepest_user_line(error)
    return f"{file}:{number}" if file else ""


def check_arguments(function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """SetupError for arguments that the function lacks, and for ones that it needs."""
    signature = inspect.signature(function)
    try:
        signature.bind(**arguments)
    except TypeError as error:
        names = ", ".join(signature.parameters)
        raise SetupError(f"{function.__name__}({names}): {error}") from None


def seed_everything(seed: int) -> None:
    """Seed torch, NumPy and Python, so that two calls of a setup return equal models."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)  # the generator that users' data sets draw from
    random.seed(seed)


def build(function: Callable[..., Any], seed: int = 0, **arguments: Any) -> Training:
    """Call a setup with seeded random numbers and check what it returns.

    SetupError, with the user's line, for a setup that raises and for another result.
    """
    check_arguments(function, arguments)
    seed_everything(seed)
    with errors_in_one_line(f"calling {function.__name__}"):
        result = function(**arguments)
    return _checked(result)


def _checked(result: Any) -> Training:
    n_optimizers = sum(isinstance(one, Optimizer) for one in tree_leaves(result))
    if n_optimizers > 1:
        raise SetupError(
            f"expected one torch optimizer, got {n_optimizers}: a training with several, such as a"
            " GAN, cannot be tried"
        )
    if not isinstance(result, tuple) or len(result) not in (3, 4):
        raise SetupError(f"expected the setup to return {RETURNS}, got {describe(result)}")
    model, batches, loss, *optimizers = result
    if not isinstance(model, nn.Module):
        raise SetupError(f"expected the model to be an nn.Module, got {describe(model)}")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise SetupError("expected a model with a parameter to train, and none needs a gradient")
    devices = {str(parameter.device) for parameter in model.parameters()}
    if len(devices) > 1:
        raise SetupError(f"expected a model on one device, got {', '.join(sorted(devices))}")
    # These can be iterated, too, but not by batches.
    if isinstance(batches, (Tensor, str, dict)) or not isinstance(batches, Iterable):
        raise SetupError(
            f"expected batches to be a DataLoader or a list of batches, got {describe(batches)}"
        )
    # `nn.CrossEntropyLoss`, without parentheses, can be called, and returns a module.
    if not callable(loss) or isinstance(loss, type):
        raise SetupError(
            f"expected the loss to be a function of the model and a batch, got {describe(loss)}"
        )
    optimizer = optimizers[0] if optimizers else torch.optim.AdamW(trained)
    if not isinstance(optimizer, Optimizer):
        raise SetupError(f"expected one torch optimizer, got {describe(optimizer)}")
    # Of a model that was built twice, the optimizer would update the other one.
    owned = {id(parameter) for parameter in model.parameters()}
    groups = [one for group in optimizer.param_groups for one in group["params"]]
    if not any(id(parameter) in owned for parameter in groups):
        raise SetupError("expected an optimizer of the model's parameters, and it has others")
    return Training(model, batches, loss, optimizer, has_own_optimizer=bool(optimizers))


def tensors_in(value: Any) -> list[Tensor]:
    """List the tensors in nested containers."""
    tensors = []
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
        # torch's trees end at other mappings than dict, such as the batches of tokenizers.
        elif isinstance(leaf, Mapping):
            tensors += tensors_in([*leaf.values()])
    return tensors


def describe(value: Any) -> str:
    """Describe a value of the wrong kind: "a tensor of shape (4, 3)", "a tuple of 2"."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"


def check_first_step(training: Training) -> tuple[Any, list[str]]:
    """Run one forward and backward pass; return its batch, and parameters without a gradient.

    Gradients are dropped afterwards. SetupError for a loss that is no finite number or does not
    depend on any trained parameter.
    """
    with errors_in_one_line("taking a batch"):
        batch = next(training.forever())
    with errors_in_one_line("computing the loss"):
        loss = training.loss(training.model, batch)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise SetupError(f"expected the loss to be one number, got {describe(loss)}")
    if not loss.requires_grad:
        raise SetupError("expected a loss that depends on the parameters, and this one does not")
    if not torch.isfinite(loss).item():
        raise SetupError(f"expected a finite loss, got {loss.item()}")
    with errors_in_one_line("the backward pass"):
        loss.backward()
    without = [
        name
        for name, parameter in training.model.named_parameters()
        if parameter.requires_grad and parameter.grad is None
    ]
    training.model.zero_grad()
    trained = [one for one in training.model.parameters() if one.requires_grad]
    if len(without) == len(trained):
        raise SetupError(
            "expected a loss that depends on the model's parameters: none got a gradient"
        )
    return batch, without
