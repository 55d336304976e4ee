"""GPUs and their links as their makers declare them: peaks, memory, bandwidths.

Rates are dense (no structured sparsity); the rate of a link is that of one direction. The share of
a peak that kernels reach is a constant, by architecture.
"""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

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
    source: str
    fp8_ratio: float = 1.0
    """Peak of fp8 matmuls over the peak of bf16; 1 without fp8 units."""
    fp8_matmul_tflops: float = 0.0
    """The highest published rate of fp8 matmuls; 0 without fp8 units."""
    matmul_source: str = ""
    multiprocessors: int = 132
    gpus_per_node: int = 8
    link_gpus: int = 0
    """GPUs in one domain of fast links; 0 is one node."""
    bus_gb_s: float = 0.0
    """Measured bus bandwidth of an all-reduce over the job's nodes; 0 if nobody measured it."""

    def check_precision(self, precision: str) -> None:
        """ValueError for matmuls in a precision that the GPU does not have."""
        if precision == "fp8" and self.fp8_ratio == 1:
            raise ValueError(f"{self.name} has no fp8 matmuls: expected bf16 or fp16")
        if precision == "bf16" and self.architecture in ("volta", "turing"):
            raise ValueError(f"{self.name} has no bf16 matmuls: expected fp16")

    def with_network(
        self,
        *,
        network_gbps: float | None = None,
        gpus_per_node: int | None = None,
        bus_gb_s: float | None = None,
    ) -> "Hardware":
        """Return the same GPU in another node or network; None keeps the declared value."""
        # A rack of linked nodes stays one. Otherwise a domain of fast links is the new node.
        has_rack = self.link_gpus > self.gpus_per_node
        rack_gpus = self.link_gpus if has_rack else 0
        return replace(
            self,
            network_gbps=network_gbps or self.network_gbps,
            gpus_per_node=gpus_per_node or self.gpus_per_node,
            bus_gb_s=bus_gb_s or self.bus_gb_s,
            link_gpus=max(gpus_per_node or 0, rack_gpus),
        )


HARDWARE: Mapping[str, Hardware] = {
    row["name"]: validate(Hardware, row) for row in read_table("hardware")
}
_BY_NAME = {declared.lower(): card for declared, card in HARDWARE.items()}


@cache
def find_hardware(name: str) -> Hardware:
    """Find a declared GPU by its name, a shorter one, or as `nvidia-smi` prints it.

    A shorter name is the first declared GPU that begins with it. A name may have another memory,
    `B200-192GB`. ValueError for others, which have no declared peak.
    """
    words = _normalize(name)
    # A declared name may have words that `_normalize` drops.
    for spelling in (words, name.lower()):
        if spelling in _BY_NAME:
            return _BY_NAME[spelling]
    memory = re.search(r"-(\d+)gb$", words)
    stem = words[: memory.start()] if memory else words
    # "4090" is an RTX 4090.
    beginnings = (f"{stem}-", f"rtx-{stem}-")
    family = [card for known, card in _BY_NAME.items() if known.startswith(beginnings)]
    if not family:
        raise ValueError(f"unknown GPU {name[:60]!r}; {_nearest_names(words)}")
    if memory is None:
        return family[0]
    size = float(memory[1])
    nearest = min(family, key=lambda card: abs(card.memory_gib - size))
    if size == nearest.memory_gib:
        return nearest
    # With more than twice the memory, or less than half, it is another GPU.
    if not 0.5 <= size / nearest.memory_gib <= 2:
        raise ValueError(f"unknown GPU {name[:60]!r}: {nearest.name} is the nearest declared")
    return replace(nearest, name=name, memory_gib=size)


def _nearest_names(words: str) -> str:
    near = difflib.get_close_matches(words, _BY_NAME, n=3, cutoff=0.4)
    if near:
        return f"the nearest declared are {', '.join(_BY_NAME[one].name for one in near)}"
    return f"declared are {', '.join(HARDWARE)}"


def _normalize(name: str) -> str:
    """Return a GPU's name in lower case with hyphens.

    `NVIDIA H100 80GB HBM3` and `A100 80GB PCIe` become this project's spelling.
    """
    words = re.sub(r"[\s_]+", "-", name.lower())
    # Makers and product lines, which not everybody writes.
    words = re.sub(
        r"nvidia|amd|geforce|quadro|tesla|instinct|(server|workstation)-edition|-generation",
        "",
        words,
    )
    # The generation of a socket or of memory says nothing that the GPU's name does not.
    words = re.sub(r"sxm\d", "sxm", words)
    words = re.sub(r"-(hbm\d\w?|oam|server|ws)(?=-|$)", "", words)
    words = words.replace("gh200-480gb", "gh200")  # the CPU's memory
    words = re.sub(r"-+", "-", words).strip("-")
    # `nvidia-smi` has the memory before the form, tables have it behind.
    memory_first = re.fullmatch(r"(.+)-(\d+gb)-(pcie|sxm)", words)
    if memory_first is not None:
        words = f"{memory_first[1]}-{memory_first[3]}-{memory_first[2]}"
    return words
