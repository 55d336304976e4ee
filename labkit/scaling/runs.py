"""What is predicted: a model on GPUs under a layout; many such runs as columns."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isqrt
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from labkit.scaling import Count
from labkit.scaling.constants import BY_ARCHITECTURE, Constants, load_constants
from labkit.scaling.hardware import Hardware
from labkit.scaling.models import Model, Numbers

Flags = NDArray[np.bool_]
Texts = NDArray[np.str_]

SHARDS = {
    "none": "DDP",
    "zero1": "ZeRO-1",
    "zero2": "ZeRO-2",
    "zero3": "FSDP (ZeRO-3)",
    "hsdp": "FSDP inside nodes",
}
Shard = Literal["none", "zero1", "zero2", "zero3", "hsdp"]
Recompute = Literal["none", "selective", "full"]
Precision = Literal["bf16", "fp16", "fp8"]
Option = Literal["old_pipeline", "blocking_launch", "op_recompute"]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Degrees of parallelism, the batch, and what is traded for memory.

    tp tensor, pp pipeline (vp chunks of layers per stage), cp context, dp data parallelism:
    tp*pp*cp*dp GPUs. Data-parallel ranks divide what `shard` says: nothing, optimizer (zero1), also
    gradients (zero2), also parameters (zero3); hsdp is zero3 inside a node with copies between
    nodes. `micro_batch` and `global_batch` are sequences.
    """

    tp: Count = 1
    sequence_parallel: bool = False
    pp: Annotated[int, Field(ge=1, le=512)] = 1
    vp: Count = 1
    cp: Count = 1
    dp: Count = 1
    shard: Shard = "none"
    micro_batch: Count = 1
    global_batch: Count = 1
    recompute: Recompute = "none"
    precision: Precision = "bf16"
    options: frozenset[Option] = frozenset()
    """Variants of one framework, as `data/reference/scaling/README.md` says."""

    @property
    def gpus(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    @property
    def micro_batches(self) -> float:
        """Micro-batches per replica and step, whose gradients accumulate."""
        return self.global_batch / (self.dp * self.micro_batch)

    @property
    def arrangement(self) -> str:
        """Degrees and sharding, by which layouts differ most: "tp 2, dp 16, ZeRO-1"."""
        degrees = [
            f"{name} {getattr(self, name)}"
            for name in ("tp", "pp", "cp", "dp")
            if getattr(self, name) > 1
        ]
        sharding = [SHARDS[self.shard]] if self.dp * self.cp > 1 else []
        return ", ".join(degrees + sharding) or "one GPU"

    def __str__(self) -> str:
        """Return the arrangement, and chunks of an interleaved schedule."""
        if self.vp == 1:
            return self.arrangement
        return f"{self.arrangement}, {self.vp} chunks per stage"


def impossible_reason(layout: Layout, model: Model, seq_len: int) -> str | None:
    """Return the first reason why this layout cannot run this model; None if it can."""
    replica = layout.global_batch // layout.dp
    divided = [
        (model.heads, "heads", "tp", layout.tp),
        (seq_len, "tokens", "cp", layout.cp),
        (layout.global_batch, "sequences", "dp", layout.dp),
        (replica, "sequences per replica", "micro_batch", layout.micro_batch),
    ]
    if layout.sequence_parallel:
        divided.append((seq_len // layout.cp, "tokens of sequence parallelism", "tp", layout.tp))
    for count, things, name, parts in divided:
        if count % parts:
            return (
                f"{count} {things} cannot be divided over {name} = {parts};"
                f" the nearest divisor is {nearest_divisor(count, parts)}"
            )
    chunks = layout.pp * layout.vp
    # Embedding and loss may stand for a layer each: Llama 3 405B has 126 layers on 8 x 16 chunks
    # (arXiv:2407.21783, section 3.3.2).
    if chunks > model.layers + 2:
        return f"pp x vp = {chunks} stages are more than {model.layers} layers"
    if layout.vp > 1 and layout.pp == 1:
        return f"vp = {layout.vp} interleaves stages of a pipeline, and pp is 1"
    return None


def nearest_divisor(number: int, wanted: int) -> int:
    """Return the divisor of a number that is nearest to a wanted one."""
    small = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return min((*small, *(number // n for n in small)), key=lambda n: abs(n - wanted))


@dataclass(frozen=True)
class Run:
    """A training to be predicted; `framework` names a profile of constants."""

    model: Model
    hardware: Hardware
    layout: Layout
    seq_len: int
    framework: str = "generic"
    table: str = ""
    """Published table that it is a row of; empty for a run of another source."""


class Runs:
    """Columns of n runs, float64 or texts of shape (n,).

    Attributes are those of the runs, their layouts, models (`name`, too) and hardware; items are
    constants: `runs["launch_s"]`.
    """

    def __init__(self, runs: Sequence[Run], constants: Constants | None = None) -> None:
        """ValueError for no runs."""
        if not runs:
            raise ValueError("expected one run or more")
        self.origin: list[Any] = list(runs)
        self.constants = constants or load_constants()
        self._constants: dict[str, Numbers] = {}

    def __getattr__(self, name: str) -> NDArray[Any]:
        """Make a column of an attribute of the runs or their parts, on first use."""
        # A copy has no runs yet, when copying asks for its methods.
        if "origin" not in vars(self):
            raise AttributeError(name)
        owners = self.origin
        for part in ("layout", "model", "hardware"):
            if hasattr(getattr(owners[0], part), name):
                owners = [getattr(run, part) for run in owners]
                break
        values = np.array([getattr(owner, name) for owner in owners])
        column = values if values.dtype.kind == "U" else values.astype(np.float64)
        self.__dict__[name] = column
        return column

    def __getitem__(self, quantity: str) -> Numbers:
        """Return the constant that holds for each run, computed on first use."""
        if quantity not in self._constants:
            column = "architecture" if quantity in BY_ARCHITECTURE else "framework"
            # Once per name, not per run: thousands of runs have a few names.
            names, codes = self.codes[column]
            values = [self.constants.value(quantity, str(name)) for name in names]
            self._constants[quantity] = np.array(values)[codes]
        return self._constants[quantity]

    def with_constants(self, constants: Constants) -> "Runs":
        """Return the same runs, with their columns so far, under other constants."""
        other = Runs(self.origin)
        other.__dict__ |= self.__dict__ | {"constants": constants, "_constants": {}}
        return other

    def __len__(self) -> int:
        return len(self.origin)

    def take(self, rows: Any) -> "Runs":
        """Return the rows that a mask, indices or a slice select."""
        return Runs([self.origin[row] for row in np.arange(len(self))[rows]], self.constants)

    def has(self, option: Option) -> Flags:
        """Return whether each run's layout has this option."""
        return np.array([option in run.layout.options for run in self.origin])

    @cached_property
    def codes(self) -> dict[str, tuple[Texts, NDArray[np.intp]]]:
        """Distinct names of the two columns that constants depend on, and each row's index."""
        columns = {"architecture": self.architecture, "framework": self.framework}
        return {name: np.unique(column, return_inverse=True) for name, column in columns.items()}

    @property
    def gathers_parameters(self) -> Flags:
        """Parameters and gradients are divided, and gathered layer by layer."""
        return np.isin(self.shard, ("zero3", "hsdp"))

    @cached_property
    def tokens(self) -> Numbers:
        """Tokens per micro-batch and rank: b S / cp."""
        return self.micro_batch * self.seq_len / self.cp

    @property
    def shard_ranks(self) -> Numbers:
        """Ranks that divide what `shard` says: all replicas, with hsdp those of a node."""
        inside = np.maximum(self.gpus_per_node / (self.tp * self.cp), 1)
        replicas = np.where(self.shard == "hsdp", np.minimum(self.dp, inside), self.dp)
        return np.where(self.shard == "none", 1.0, replicas * self.cp)

    @cached_property
    def sequence_share(self) -> Numbers:
        """Share of norms, dropouts and residuals on a rank: 1/tp with sequence parallelism."""
        return np.where(self.sequence_parallel > 0, 1 / self.tp, 1.0)

    @cached_property
    def stage_layers(self) -> Numbers:
        """Layers of each pipeline stage, (n, stages); 0 beyond a row's pp.

        nanotron's `build_and_set_rank`: a layer costs 4h^2 + 3hf, the head Vh, the embedding
        nothing; a stage takes layers until the costs so far reach its share. Published memory peaks
        confirm it to four digits. Other frameworks split evenly.
        """
        index = np.arange(int(self.pp.max()))[None, :]
        pp = self.pp[:, None]
        layers = self.layers[:, None]
        cost = (4 * self.hidden**2 + 3 * self.hidden * self.ffn)[:, None]
        total = layers * cost + (self.vocab * self.hidden)[:, None]
        filled = total * (index + 1) / pp / cost
        # Costs that reach a share exactly fill the stage, but did not before a fix. Rounding must
        # not decide that.
        tie = np.where(self.has("old_pipeline"), 1e-9, -1e-9)[:, None]
        greedy = np.minimum(np.ceil(filled + tie), layers)
        even = np.floor(layers * (index + 1) / pp)
        through = np.where((self.framework == "nanotron")[:, None], greedy, even)
        through = np.where(index >= pp - 1, layers, through)
        return np.diff(through, axis=1, prepend=0.0)
