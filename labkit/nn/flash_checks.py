"""Chooses tiles that return and are right: each is checked before its first use on a device.

Results are compared with float64. A tile with specialized warps may also never return, as its
warps wait for one another: it runs in another process, which has a deadline. The answer is kept in
the user's cache folder.
"""

import functools
import hashlib
import json
import math
import os
import subprocess
import sys
import warnings
from contextlib import suppress
from multiprocessing import connection
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from labkit.machine.gpus import driver_version
from labkit.nn import attention
from labkit.nn.attention import dtype_name
from labkit.nn.flash_launch import KERNELS, delta, launch
from labkit.nn.flash_tiles import Tile, tiles_for

PROBE_QUERIES = 300
PROBE_KEYS = 333  # full, diagonal and ragged blocks of every tile
# Seconds for a process to import torch, start CUDA and compile, on a slow disk too.
START_S = 120.0
# Seconds for a compiled kernel that takes less than a millisecond.
DEADLINE_S = 20.0
CHILD = "from labkit.nn.flash_checks import answer_parent; answer_parent()"


class Case(NamedTuple):
    """What a kernel is compiled for, apart from its tile."""

    kernel: str
    head_dim: int
    group: int
    dtype: torch.dtype
    causal: bool
    device: torch.device


@functools.cache
def usable_tiles(case: Case) -> tuple[Tile, ...]:
    """The tiles that return and agree with float64; RuntimeError if none does."""
    tiles = tiles_for(
        case.kernel,
        dtype=case.dtype,
        head_dim=case.head_dim,
        capability=torch.cuda.get_device_capability(case.device),
    )
    wrong = {}
    for tile in tiles:
        fault = remembered_fault(case, tile) if tile.specialize else tile_fault(case, tile)
        if fault is not None:
            wrong[tile] = fault
    text = (
        f"{case.kernel} kernel, head dimension {case.head_dim}, {dtype_name(case.dtype)}, on"
        f" {case.device}"
    )
    for tile, fault in wrong.items():
        warnings.warn(f"{text}: tile {tile} is left out: {fault}", stacklevel=2)
    if len(wrong) == len(tiles):
        raise RuntimeError(f"{text}: no tile can be used: {'; '.join(wrong.values())}")
    return tuple(tile for tile in tiles if tile not in wrong)


def tile_fault(case: Case, tile: Tile) -> str | None:
    """Compare a kernel with this tile with float64; return the reason against it, or None."""
    expected = _probe(case._replace(kernel=""))[1]
    try:
        results = launch(case.kernel, _inputs(case), case.causal, None, (tile,))
    except Exception as error:  # of several types, by what fails: compilation, resources, launch
        return str(error).partition("\n")[0] or type(error).__name__
    # Half precision rounds each result once; in float32 the rounding of sums counts for more.
    limit = max(2 * torch.finfo(case.dtype).eps, 2**-17)
    for result, exact in zip(results, expected[case.kernel], strict=True):
        off = float((result.double() - exact).norm() / exact.norm())
        # Not `>`: NaN must be off, too.
        if not off <= limit:
            return f"relative error {off:.1e}, expected at most {limit:.1e}"
    return None


def _inputs(case: Case) -> list[Tensor]:
    q, k, v, grad_output, output, logsumexp = _probe(case._replace(kernel=""))[0]
    if case.kernel == "forward":
        return [q, k, v]
    return [q, k, v, grad_output, logsumexp, delta(output, grad_output)]


@functools.lru_cache(maxsize=1)
def _probe(case: Case) -> tuple[list[Tensor], dict[str, tuple[Tensor, ...]]]:
    """Make a small problem and its results in float64, by kernel.

    q, k, v, dO, and the output and base-2 logsumexp. `case` names no kernel, so that all kernels
    share the problem that is cached.
    """
    generator = torch.Generator().manual_seed(0)
    queries = (case.group, PROBE_QUERIES, case.head_dim)
    keys = (1, PROBE_KEYS, case.head_dim)
    inputs = [
        torch.randn(*size, generator=generator).to(case.device, case.dtype)
        for size in (queries, keys, keys, queries)
    ]
    with torch.enable_grad(), torch.autocast(case.device.type, enabled=False):
        q, k, v = (x.double().requires_grad_() for x in inputs[:3])
        output = attention.naive_attention(q, k, v, case.causal)
        grad_q, grad_k, grad_v = torch.autograd.grad(output, (q, k, v), inputs[3].double())
        scores = attention.masked_scores(q, k, case.causal)
        logsumexp = torch.logsumexp(scores, dim=-1).detach() / math.log(2)
    output = output.detach()
    inputs += [output.to(case.dtype), logsumexp.float()]
    return inputs, {
        "forward": (output, logsumexp),
        "grad_kv": (grad_k, grad_v),
        "grad_q": (grad_q,),
    }


# ----------------------------------------------------------------------------- in another process


def remembered_fault(case: Case, tile: Tile) -> str | None:
    """Return the reason against a tile that may never return, or None; asked once per user.

    Another GPU, driver, Triton or kernel is asked for itself.
    """
    about = {
        "device": torch.cuda.get_device_name(case.device),
        "driver": driver_version(),
        "Triton": triton.__version__,
        "code": KERNELS[case.kernel].cache_key,
        "case": [case.kernel, case.head_dim, case.group, dtype_name(case.dtype), case.causal],
        "tile": tile,
    }
    path = _answer_path(json.dumps(about))
    with suppress(OSError, ValueError, KeyError):
        answer: dict[str, str | None] = json.loads(path.read_text())
        return answer["fault"]
    # What may differ the next time, such as too little memory, is not remembered.
    fault, is_final = fault_in_child(case, tile)
    if is_final:
        with suppress(OSError):  # a folder that cannot be written: asked again next time
            path.parent.mkdir(parents=True, exist_ok=True)
            # Ranks of one machine ask at the same time, and must not read half an answer.
            unfinished = path.with_suffix(f".{os.getpid()}")
            unfinished.write_text(json.dumps(about | {"fault": fault}))
            unfinished.replace(path)
    return fault


def _answer_path(about: str) -> Path:
    folder = os.environ.get("XDG_CACHE_HOME") or os.environ.get("HOME", "") + "/.cache"
    digest = hashlib.sha256(about.encode()).hexdigest()[:24]
    return Path(folder) / "labkit" / "tiles" / f"{digest}.json"


def fault_in_child(case: Case, tile: Tile) -> tuple[str | None, bool]:
    """Return the fault that another process finds, and whether it would find the same again."""
    question = json.dumps(
        [*case[:3], dtype_name(case.dtype), case.causal, case.device.index or 0, tile]
    )
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, question],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    try:
        if not connection.wait([process.stdout.fileno()], START_S):
            return f"it could not be tried: a process did not start in {START_S:.0f} s", False
        answer = process.communicate(timeout=DEADLINE_S)[0].splitlines()
    except subprocess.TimeoutExpired:
        return f"it did not return in {DEADLINE_S:.0f} s", True
    finally:
        process.kill()
        # A process whose kernel hangs ends when the driver has stopped the kernel.
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=DEADLINE_S)
    if process.returncode != 0 or len(answer) < 2:
        # Too little memory, or a GPU that takes one process: the next time may differ.
        return f"it could not be tried: its process ended with status {process.returncode}", False
    return json.loads(answer[-1]), True


def answer_parent() -> None:
    """In the other process: a line when the tile is compiled, then its fault as JSON."""
    kernel, head_dim, group, dtype, causal, index, tile = json.loads(sys.argv[1])
    device = torch.device("cuda", index)
    case = Case(kernel, head_dim, group, getattr(torch, dtype), causal, device)
    # A busy machine may take longer to compile than the deadline; a failure is met again below.
    with suppress(Exception):
        launch(kernel, _inputs(case), causal, None, (Tile(*tile),), compile_only=True)
        torch.cuda.synchronize(device)
    print("compiled", flush=True)
    print(json.dumps(tile_fault(case, Tile(*tile))), flush=True)
