"""Changes that are tried on a training: what each does, when it applies, and its code.

A change gets a training of its own, fresh from the setup, and returns the loop that runs it. To add
one: a function, and its entry in `CHANGES`.
"""

import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from labkit.nn.attention_implementations import no_compiler_reason
from labkit.studies.your_training.loop import Loop
from labkit.studies.your_training.memory import available_bytes, count_peak
from labkit.studies.your_training.setup import Training

FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
MIN_MEMORY_SHARE = 0.5
"""Share of the available memory from which up a step is short of it."""
CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d)


@dataclass(frozen=True)
class Change:
    """One change to a training."""

    apply: Callable[[Loop], None]
    """Changes a loop before its first step."""
    refusal: Callable[[Training], str | None]
    """Why it does not apply to a training, or None."""
    code: str
    """Python that makes the change in the reader's script."""
    title: str
    """What it is, in a sentence: "a fused optimizer"."""
    precision: str = "float32"
    """Arithmetic of its passes, whose rounding bounds the differences of gradients."""
    saves_memory: bool = False
    """Whether it is there for memory, and may cost time."""


def _workers() -> int:
    return max(1, min(2, len(os.sched_getaffinity(0))))


def _loader_refusal(training: Training) -> str | None:
    loader = training.batches
    if not isinstance(loader, DataLoader):
        return "batches are no DataLoader"
    if loader.num_workers > 0:
        return f"the DataLoader has {loader.num_workers} workers already"
    if isinstance(loader.dataset, IterableDataset):
        return "an IterableDataset would be read by every worker"
    if loader.batch_sampler is None:
        return "the DataLoader has no batches of its own"
    if not isinstance(loader.sampler, RandomSampler | SequentialSampler):
        return f"the DataLoader has a sampler of its own, {type(loader.sampler).__name__}"
    return None


def _use_workers(loop: Loop) -> None:
    loader: Any = loop.training.batches
    on_gpu = loop.training.device.type == "cuda"
    loop.training.batches = with_batch_sampler(
        loader,
        loader.batch_sampler,
        num_workers=_workers(),
        persistent_workers=True,
        pin_memory=loader.pin_memory or on_gpu,
    )


def with_batch_sampler(loader: Any, batch_sampler: Any, **options: Any) -> DataLoader[Any]:
    """Return a loader like this one, with another sampler of batches and these options."""
    names = ("collate_fn", "pin_memory", "timeout", "worker_init_fn", "generator", "num_workers")
    same = {name: getattr(loader, name) for name in names}
    return DataLoader(loader.dataset, batch_sampler=batch_sampler, **(same | options))


def _compile_refusal(training: Training) -> str | None:
    if hasattr(training.model, "_orig_mod"):  # what torch.compile returns has the model there
        return "the model is compiled already"
    return no_compiler_reason(training.device.type)


def _compile(loop: Loop) -> None:
    loop.call = torch.compile(loop.training.model)


def _autocast_refusal(training: Training) -> str | None:
    dtypes = {parameter.dtype for parameter in training.model.parameters()}
    if dtypes != {torch.float32}:
        return "the parameters are not all float32"
    return None


def _autocast(loop: Loop) -> None:
    device_type = loop.training.device.type
    loop.forward_context = partial(torch.autocast, device_type, dtype=torch.bfloat16)


def _fused_refusal(training: Training) -> str | None:
    optimizer = training.optimizer
    if type(optimizer) not in FUSED:
        return f"torch has no fused {type(optimizer).__name__}"
    if optimizer.defaults.get("fused"):
        return "the optimizer is fused already"
    if optimizer.defaults.get("differentiable"):
        return "the optimizer is differentiable"
    return None


def _use_fused_optimizer(loop: Loop) -> None:
    loop.training.optimizer = with_option(loop.training.optimizer, fused=True, foreach=False)


def with_option(optimizer: Optimizer, **options: Any) -> Optimizer:
    """Return a new optimizer of the same kind, groups and settings, with these options."""
    groups, settings = constructor_arguments(optimizer)
    kind: Any = type(optimizer)
    return kind([group | options for group in groups], **(settings | options))


def constructor_arguments(optimizer: Optimizer) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return groups and settings from which its class makes an optimizer like this one."""
    # Some defaults are set by the class itself, such as AdamW's decoupled weight decay.
    names = {*inspect.signature(type(optimizer)).parameters, "params"}
    groups = [
        {name: value for name, value in group.items() if name in names}
        for group in optimizer.param_groups
    ]
    settings = {name: value for name, value in optimizer.defaults.items() if name in names}
    return groups, settings


def _one_thread_refusal(training: Training) -> str | None:
    if training.device.type != "cpu":
        return "the model is on a GPU"
    if torch.get_num_threads() == 1:
        return "there is one thread already"
    return None


def _use_one_thread(loop: Loop) -> None:
    loop.turn_contexts.append(partial(threads, 1))


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Run the block with a number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _precision_refusal(training: Training) -> str | None:
    if training.device.type != "cuda":
        return "TF32 is arithmetic of NVIDIA GPUs"
    try:
        precision = torch.get_float32_matmul_precision()
    except RuntimeError:  # it was set by torch's newer names, which the older ones cannot say
        return "the precision of matmuls is set already"
    if precision != "highest":
        return "the precision of matmuls is set already"
    if torch.cuda.get_device_capability(training.device) < (8, 0):
        return "the GPU has no TF32"
    return None


def _use_tf32(loop: Loop) -> None:
    loop.turn_contexts.append(partial(matmul_precision, "high"))


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """Run the block with torch's precision of float32 matmuls."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _layout_refusal(training: Training) -> str | None:
    layers = [one for one in training.model.modules() if isinstance(one, CONVOLUTIONS)]
    if not layers:
        return "the model has no convolutions of images"
    if all(one.weight.is_contiguous(memory_format=torch.channels_last) for one in layers):
        return "the model is in channels_last already"
    return None


def _use_channels_last(loop: Loop) -> None:
    # In place: an optimizer has these parameters.
    loop.training.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def _checkpointing_refusal(training: Training) -> str | None:
    if len(repeated_blocks(training.model)) < 2:
        return "the model has no repeated blocks"
    share = count_peak(Loop(training)) / available_bytes(training.device)
    if share < MIN_MEMORY_SHARE:
        return f"memory is not short: a step takes {100 * share:.0f}% of it"
    return None


def _checkpoint(loop: Loop) -> None:
    for block in repeated_blocks(loop.training.model):
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the most modules of one class, made of others, that stand in one list of a model."""
    found: list[nn.Module] = []
    for parent in model.modules():
        if isinstance(parent, nn.ModuleList | nn.Sequential):
            # A single layer keeps its input in any case: nothing is saved.
            blocks = [one for one in parent if len([*one.children()])]
            for kind in {type(one) for one in blocks}:
                same = [one for one in blocks if type(one) is kind]
                found = max(found, same, key=len)
    return found


CHANGES: Mapping[str, Change] = {
    "loader workers": Change(
        _use_workers,
        _loader_refusal,
        f"loader = DataLoader(..., num_workers={_workers()}, persistent_workers=True)",
        "a loader with workers",
    ),
    "torch.compile": Change(
        _compile, _compile_refusal, "model = torch.compile(model)", "torch.compile"
    ),
    "fused optimizer": Change(
        _use_fused_optimizer,
        _fused_refusal,
        "optimizer = type(optimizer)(..., fused=True)",
        "a fused optimizer",
    ),
    "one thread": Change(
        _use_one_thread, _one_thread_refusal, "torch.set_num_threads(1)", "one thread"
    ),
    "channels_last": Change(
        _use_channels_last,
        _layout_refusal,
        "model = model.to(memory_format=torch.channels_last)",
        "the layout channels_last",
    ),
    "TF32 matmuls": Change(
        _use_tf32,
        _precision_refusal,
        'torch.set_float32_matmul_precision("high")',
        "TF32, which changes results,",
        precision="bfloat16",
    ),
    "autocast to bfloat16": Change(
        _autocast,
        _autocast_refusal,
        "with torch.autocast(device.type, dtype=torch.bfloat16):\n"
        "    loss = loss_function(model, batch)",
        "autocast, which changes results,",
        precision="bfloat16",
    ),
    "checkpointing": Change(
        _checkpoint,
        _checkpointing_refusal,
        "for block in blocks:  # the model's repeated ones\n"
        "    block.forward = partial(checkpoint, block.forward, use_reentrant=False)",
        "checkpointing of the repeated blocks",
        saves_memory=True,
    ),
}
"""Changes by name, in the order in which they are tried."""


def apply_all(loop: Loop, names: Iterable[str]) -> None:
    """Apply changes in the order of `CHANGES`: a compiler sees what the others have changed."""
    chosen = set(names)
    for name in sorted(chosen, key=lambda name: (name == "torch.compile", [*CHANGES].index(name))):
        CHANGES[name].apply(loop)
