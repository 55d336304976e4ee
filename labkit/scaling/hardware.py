"""GPUs and their links as their makers declare them: peaks, memory, bandwidths.

Rates are dense (no structured sparsity); the rate of a link is that of one direction. The share of
a peak that kernels reach is a constant, by architecture.
"""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from labkit.scaling import read_table, validate


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """A kind of GPU, how many share a node, and the network between nodes."""

    name: str
    architecture: str
    peak_tflops: float
    """bf16 and fp16 matmuls, 1e12 FLOP/s."""
    matmul_tflops: float
    """The highest rate of bf16 or fp16 matmuls that was published; no prediction is faster."""
    memory_gib: float
    memory_gb_s: float
    link_gb_s: float
    """GPU to GPU inside a node: one direction, all lanes of one GPU."""
    network_gbps: float
    """All links of a node together, gigabits per second in one direction."""
    fp8_ratio: float = 1.0
    """Peak of fp8 matmuls over the peak of bf16; 1 without fp8 units."""
    fp8_matmul_tflops: float = 0.0
    """The highest published rate of fp8 matmuls; 0 without fp8 units."""
    multiprocessors: int = 132
    gpus_per_node: int = 8
    link_gpus: int = 0
    """GPUs in a rack of fast links; 0 where a node has them alone."""
    bus_gb_s: float = 0.0
    """Measured bus bandwidth of an all-reduce over the job's nodes; 0 if nobody measured it."""

    def check_precision(self, precision: str) -> None:
        """ValueError for matmuls in a precision that the GPU does not have."""
        if precision == "fp8" and self.fp8_ratio == 1:
            raise ValueError(f"{self.name} has no fp8 matmuls: expected bf16 or fp16")
        if precision == "bf16" and self.architecture in ("volta", "turing"):
            raise ValueError(f"{self.name} has no bf16 matmuls: expected fp16")

    def with_network(self, **changes: Any) -> "Hardware":
        """Return the same GPU in another node or network; None keeps the declared value."""
        return replace(self, **{name: value for name, value in changes.items() if value})


HARDWARE: Mapping[str, Hardware] = {
    row["name"]: validate(Hardware, row) for row in read_table("hardware")
}
# What makers, product lines and `nvidia-smi` add to a name that says nothing more of the GPU: among
# them the generation of its memory, and the CPU's memory of a GH200.
_NOISE = re.compile(
    r"nvidia|amd|geforce|quadro|tesla|instinct|generation|edition|server|workstation|ws|oam"
    r"|hbm\d\w?|480gb"
)
# Words that several GPUs share, so that they name none alone.
_SHARED = re.compile(r"\d*gb|\d+w|sxm|pcie|nvl|ada|blackwell")


@cache
def find_hardware(name: str) -> Hardware:
    """Find a declared GPU by its name, a part of it, or as `nvidia-smi` prints it.

    It is the first declared one that has all words of the name, in any order. ValueError for
    others, which have no declared peak.
    """
    words = _words(name)
    alike = [card for card in HARDWARE.values() if set(words) <= set(_words(card.name))]
    if alike and not all(map(_SHARED.fullmatch, words)):
        return alike[0]

    def likeness(card: Hardware) -> tuple[int, float]:
        matcher = difflib.SequenceMatcher(None, "-".join(words), card.name.lower())
        common = set(words) & set(_words(card.name))
        return sum(not _SHARED.fullmatch(word) for word in common), matcher.ratio()

    near = sorted(HARDWARE.values(), key=likeness, reverse=True)[:3]
    names = ", ".join(card.name for card in near)
    raise ValueError(f"unknown GPU {name[:60]!r}; the nearest declared are {names}")


@cache
def _words(name: str) -> list[str]:
    """Return the words of a GPU's name that say which one it is; SXM4 is SXM."""
    words = re.split(r"[\s_-]+", re.sub(r"sxm\d", "sxm", name.lower()))
    return [word for word in words if word and not _NOISE.fullmatch(word)]
