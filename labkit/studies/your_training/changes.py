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
from labkit.studies.shared.alternatives import threads
from labkit.studies.your_training.loop import Loop
from labkit.studies.your_training.memory import available_bytes, count_peak
from labkit.studies.your_training.setup import Training

FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
# Share of the available memory from which up a step is short of it: with less, twice the batch
# would still fit.
MIN_MEMORY_SHARE = 0.5
CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d)
COMPILE = "torch.compile"


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
    # Persistent: otherwise each epoch would begin by starting them.
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
    optimizer = loop.training.optimizer
    groups, settings = constructor_arguments(optimizer)
    # torch refuses both at once.
    fused = {"fused": True, "foreach": False}
    kind: Any = type(optimizer)
    loop.training.optimizer = kind([group | fused for group in groups], **(settings | fused))


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
    most: list[nn.Module] = []
    for parent in model.modules():
        if isinstance(parent, nn.ModuleList | nn.Sequential):
            # A single layer keeps its input in any case: nothing is saved.
            blocks = [one for one in parent if len([*one.children()])]
            for kind in {type(one) for one in blocks}:
                same = [one for one in blocks if type(one) is kind]
                most = max(most, same, key=len)
    return most


# Changes by name, in the order in which they are tried.
CHANGES: Mapping[str, Change] = {
    "loader workers": Change(
        apply=_use_workers,
        refusal=_loader_refusal,
        code=f"loader = DataLoader(..., num_workers={_workers()}, persistent_workers=True)",
        title="a loader with workers",
    ),
    COMPILE: Change(
        apply=_compile,
        refusal=_compile_refusal,
        code="model = torch.compile(model)",
        title="torch.compile",
    ),
    "fused optimizer": Change(
        apply=_use_fused_optimizer,
        refusal=_fused_refusal,
        code="optimizer = type(optimizer)(..., fused=True)",
        title="a fused optimizer",
    ),
    "one thread": Change(
        apply=_use_one_thread,
        refusal=_one_thread_refusal,
        code="torch.set_num_threads(1)",
        title="one thread",
    ),
    "channels_last": Change(
        apply=_use_channels_last,
        refusal=_layout_refusal,
        code="model = model.to(memory_format=torch.channels_last)",
        title="the layout channels_last",
    ),
    "TF32 matmuls": Change(
        apply=_use_tf32,
        refusal=_precision_refusal,
        code='torch.set_float32_matmul_precision("high")',
        title="TF32, which changes results,",
        precision="bfloat16",
    ),
    "autocast to bfloat16": Change(
        apply=_autocast,
        refusal=_autocast_refusal,
        code=(
            "with torch.autocast(device.type, dtype=torch.bfloat16):\n"
            "    loss = loss_function(model, batch)"
        ),
        title="autocast, which changes results,",
        precision="bfloat16",
    ),
    "checkpointing": Change(
        apply=_checkpoint,
        refusal=_checkpointing_refusal,
        code=(
            "for block in blocks:  # the model's repeated ones\n"
            "    block.forward = partial(checkpoint, block.forward, use_reentrant=False)"
        ),
        title="checkpointing of the repeated blocks",
        saves_memory=True,
    ),
}


def apply_all(loop: Loop, names: Iterable[str]) -> None:
    """Apply changes in the order of `CHANGES`, torch.compile last."""
    # A compiler sees what the others have changed.
    for name in sorted(names, key=lambda name: (name == COMPILE, [*CHANGES].index(name))):
        CHANGES[name].apply(loop)
