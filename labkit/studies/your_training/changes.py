"""Changes that are tried on a training: what each does, when it applies, and its code.

A change gets a training of its own, fresh from the setup. To add one: its entry in `CHANGES`.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from textwrap import dedent
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from labkit.nn.attention_implementations import no_compiler_reason
from labkit.studies.shared.alternatives import threads
from labkit.studies.your_training.loop import Context, Loop
from labkit.studies.your_training.memory import available_bytes, count_peak
from labkit.studies.your_training.setup import Training

FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
# Share of the available memory from which up a step is short of it: with less, twice the batch
# would still fit.
MIN_MEMORY_SHARE = 0.5
CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d)
COMPILE = "torch.compile"
# Model, batches, loss and optimizer.
Parts = tuple[Any, Any, Any, Any]


@dataclass(frozen=True, kw_only=True)
class Change:
    """One change to a training."""

    make: Callable[[Any, Any, Any, Any], Parts]
    """Makes the change before the first step, to model, batches, loss and optimizer."""
    refusal: Callable[[Training], str | None]
    """Why it does not apply to a training, or None."""
    title: str
    """What it is, in a sentence: "a fused optimizer"."""
    setting: Context | None = None
    """In place of `make` if that sets the process: yours takes turns in the same one."""
    precision: str = "float32"
    """Arithmetic of its passes, whose rounding bounds the differences of gradients."""
    saves_memory: bool = False
    """Whether it is there for memory, and may cost time."""

    @property
    def code(self) -> str:
        """Return the Python that makes the change: what is printed is what was measured."""
        return dedent("".join(inspect.getsourcelines(self.make)[0][1:-1]))


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


def _compile_refusal(training: Training) -> str | None:
    if hasattr(training.model, "_orig_mod"):  # what torch.compile returns has the model there
        return "the model is compiled already"
    return no_compiler_reason(training.device.type)


def _autocast_refusal(training: Training) -> str | None:
    dtypes = {parameter.dtype for parameter in training.model.parameters()}
    if dtypes != {torch.float32}:
        return "the parameters are not all float32"
    return None


def _fused_refusal(training: Training) -> str | None:
    optimizer = training.optimizer
    if type(optimizer) not in FUSED:
        return f"torch has no fused {type(optimizer).__name__}"
    if optimizer.defaults.get("fused"):
        return "the optimizer is fused already"
    if optimizer.defaults.get("differentiable"):
        return "the optimizer is differentiable"
    return None


def _one_thread_refusal(training: Training) -> str | None:
    if training.device.type != "cpu":
        return "the model is on a GPU"
    if torch.get_num_threads() == 1:
        return "there is one thread already"
    return None


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


def _checkpointing_refusal(training: Training) -> str | None:
    if len(repeated_blocks(training.model)) < 2:
        return "the model has no repeated blocks"
    share = count_peak(Loop(training)) / available_bytes(training.device)
    if share < MIN_MEMORY_SHARE:
        return f"memory is not short: a step takes {100 * share:.2g}% of it"
    return None


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the longest list of a model's modules that are made of others."""
    lists = [one for one in model.modules() if isinstance(one, nn.ModuleList | nn.Sequential)]
    # A single layer keeps its input in any case: nothing is saved.
    blocks = [[block for block in one if list(block.children())] for one in lists]
    return max(blocks, key=len, default=[])


# The code of these functions is printed, from the line after `def` up to `return`, so they import
# what it needs, except torch.
def _use_workers(model: Any, batches: Any, loss: Any, optimizer: Any) -> Parts:
    from torch.utils.data import DataLoader

    batches = DataLoader(
        batches.dataset,
        batch_sampler=batches.batch_sampler,
        collate_fn=batches.collate_fn,
        timeout=batches.timeout,
        worker_init_fn=batches.worker_init_fn,
        generator=batches.generator,
        pin_memory=batches.pin_memory or next(model.parameters()).is_cuda,
        num_workers=2,
        persistent_workers=True,  # otherwise each epoch begins by starting them
    )
    return model, batches, loss, optimizer


def _compile(model: Any, batches: Any, loss: Any, optimizer: Any) -> Parts:
    model = torch.compile(model)
    return model, batches, loss, optimizer


def _fuse(model: Any, batches: Any, loss: Any, optimizer: Any) -> Parts:
    # As if its class had got these arguments. torch refuses both at once.
    for group in optimizer.param_groups:
        group.update(fused=True, foreach=False)
    return model, batches, loss, optimizer


def _use_one_thread(model: Any, batches: Any, loss: Any, optimizer: Any) -> Parts:
    torch.set_num_threads(1)
    return model, batches, loss, optimizer


def _use_channels_last(model: Any, batches: Any, loss: Any, optimizer: Any) -> Parts:
    model = model.to(memory_format=torch.channels_last)
    return model, batches, loss, optimizer


def _use_tf32(model: Any, batches: Any, loss: Any, optimizer: Any) -> Parts:
    torch.set_float32_matmul_precision("high")
    return model, batches, loss, optimizer


def _autocast(model: Any, batches: Any, loss: Any, optimizer: Any) -> Parts:
    device = next(model.parameters()).device.type
    loss = torch.autocast(device, dtype=torch.bfloat16)(loss)
    return model, batches, loss, optimizer


def _checkpoint(model: Any, batches: Any, loss: Any, optimizer: Any) -> Parts:
    from functools import partial

    from torch import nn
    from torch.utils.checkpoint import checkpoint

    lists = [one for one in model.modules() if isinstance(one, nn.ModuleList | nn.Sequential)]
    blocks = [[block for block in one if list(block.children())] for one in lists]
    for block in max(blocks, key=len):
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return model, batches, loss, optimizer


# Changes by name, in the order in which they are tried.
CHANGES: Mapping[str, Change] = {
    "loader workers": Change(
        make=_use_workers,
        refusal=_loader_refusal,
        title="a loader with workers",
    ),
    COMPILE: Change(
        make=_compile,
        refusal=_compile_refusal,
        title="torch.compile",
    ),
    "fused optimizer": Change(
        make=_fuse,
        refusal=_fused_refusal,
        title="a fused optimizer",
    ),
    "one thread": Change(
        make=_use_one_thread,
        setting=partial(threads, 1),
        refusal=_one_thread_refusal,
        title="one thread",
    ),
    "channels_last": Change(
        make=_use_channels_last,
        refusal=_layout_refusal,
        title="the layout channels_last",
    ),
    "TF32 matmuls": Change(
        make=_use_tf32,
        setting=partial(matmul_precision, "high"),
        refusal=_precision_refusal,
        title="TF32 (which changes results)",
        precision="bfloat16",
    ),
    "autocast to bfloat16": Change(
        make=_autocast,
        refusal=_autocast_refusal,
        title="autocast (which changes results)",
        precision="bfloat16",
    ),
    "checkpointing": Change(
        make=_checkpoint,
        refusal=_checkpointing_refusal,
        title="checkpointing of the repeated blocks",
        saves_memory=True,
    ),
}


def in_order(names: Iterable[str]) -> list[str]:
    """Sort changes into the order in which they are applied: torch.compile comes last."""
    # A compiler sees what the others have changed.
    return sorted(names, key=lambda name: (name == COMPILE, [*CHANGES].index(name)))


def apply(training: Training, names: Iterable[str]) -> Loop:
    """Make changes to a training; return the loop of what they leave."""
    parts: Parts = (training.model, training.batches, training.loss, training.optimizer)
    settings = []
    for name in in_order(names):
        change = CHANGES[name]
        if change.setting is not None:
            settings.append(change.setting)
        else:
            parts = change.make(*parts)
    model, batches, loss, optimizer = parts
    changed = replace(training, batches=batches, loss=loss, optimizer=optimizer)
    return Loop(changed, call=model, settings=settings)
