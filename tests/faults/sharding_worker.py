"""Ranks that train in shards, with checkpoints, and die where they are told to."""

import hashlib
import os
import signal
from collections import namedtuple

import torch
import torch.distributed as dist
from torch.optim import AdamW

from labkit.parallel.ranks import checkpoint
from labkit.parallel.sharding import FSDP, ReduceScatterDDP, ShardedOptimizer
from tests.parallel.data_parallel_cases import WIDTH, plain

STEPS, SAVED_EVERY, KILLED_IN = 8, 2, 5
STEP, SAVE, LOAD = "in a step", "in saving", "in loading"
WHOLE, SHARDS, ZERO2 = "FSDP, saved whole", "FSDP, saved in shards", "ZeRO-2, saved whole"
Attempt = namedtuple("Attempt", "folder way killed")  # `killed`: when the last rank is, if it is


def train(attempt):
    """Eight steps from the last checkpoint on. Rows: this process, then a digest of all parameters."""
    yield {"pid": os.getpid()}
    torch.manual_seed(dist.get_rank())
    if attempt.way == ZERO2:
        model = ReduceScatterDDP(plain())
        optimizer = ShardedOptimizer(model.parameters(), AdamW, wrapper=model)
    else:
        model = FSDP(plain())
        optimizer = AdamW(model.parameters())
    for step in range(_load(attempt, model, optimizer), STEPS):
        if (step, attempt.killed) == (KILLED_IN, STEP):
            parameter = model._units[0].flats[0].full[0] if attempt.way != ZERO2 else next(model.parameters())
            parameter.register_hook(lambda _: _die())  # the other layers are being averaged
        inputs = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        if step % SAVED_EVERY == SAVED_EVERY - 1:
            if step >= KILLED_IN and attempt.killed == SAVE:
                torch.save = _half
            _save(attempt, model, optimizer, step + 1)
    whole = model.gather_full_parameters().values() if isinstance(model, FSDP) else model.parameters()
    content = b"".join(value.detach().reshape(-1).view(torch.uint8).numpy().tobytes() for value in whole)
    yield {"digest": hashlib.sha256(content).hexdigest()}


def _save(attempt, model, optimizer, step):
    if attempt.way == SHARDS:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        checkpoint.save_shards(attempt.folder, step, state)
        return
    if attempt.way == WHOLE:
        state = {"model": model.consolidated_state_dict()}
        state["optimizer"] = model.consolidated_optimizer_state_dict(optimizer)
    else:
        state = {"model": model.state_dict(), "optimizer": optimizer.consolidated_state_dict()}
    checkpoint.save(attempt.folder / "checkpoint", {"step": step, **state})


def _load(attempt, model, optimizer):
    """The step to go on with."""
    if attempt.way == SHARDS:
        step, state = checkpoint.load_shards(attempt.folder) or (0, None)
    else:
        state = checkpoint.load(attempt.folder / "checkpoint")
        step = state["step"] if state else 0
    if state:
        model.load_state_dict(state["model"])
        if attempt.killed == LOAD:
            _die()
        if attempt.way == WHOLE:
            model.load_optimizer_state_dict(optimizer, state["optimizer"])
        else:
            optimizer.load_state_dict(state["optimizer"])
    return step


def _half(state, file):
    file.write(b"half of it")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def _die():
    if dist.get_rank() == dist.get_world_size() - 1:
        os.kill(os.getpid(), signal.SIGKILL)
