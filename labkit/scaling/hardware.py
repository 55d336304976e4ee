"""GPUs and their links, as their makers declare them: peaks, memory, bandwidths. Nothing here is fitted.

Rates are dense (no structured sparsity); the rate of a link is that of one direction. What a kernel reaches of a peak
is in the table of constants, by architecture.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """A kind of GPU, how many share a node, and the network between nodes.

    `network_gbps`: all links of a node together, gigabits a second in one direction.
    """

    name: str
    architecture: str
    peak_tflops: float
    """bf16 and fp16 matrix products, 1e12 FLOP/s."""
    memory_gib: float
    memory_gb_s: float
    link_gb_s: float
    """GPU to GPU inside a node: one direction, all lanes of one GPU."""
    network_gbps: float
    source: str
    fp8_ratio: float = 1.0
    """Peak of fp8 products over that of bf16; 1 without fp8 units."""
    multiprocessors: int = 132
    gpus_per_node: int = 8
    clock_share: float = 1.0
    """Sustained clock over that of an uncapped card. Dynamic power goes with the cube of the clock."""

    def __post_init__(self) -> None:
        rates = (
            *(self.peak_tflops, self.memory_gib, self.memory_gb_s, self.link_gb_s),
            *(self.fp8_ratio, self.network_gbps, self.clock_share),
        )
        if not all(rate > 0 for rate in rates) or self.gpus_per_node < 1 or self.multiprocessors < 1:
            raise ValueError(f"expected positive rates and sizes, got {self}")

    def linked(self, *, network_gbps: float | None = None, gpus_per_node: int | None = None) -> "Hardware":
        """The same GPU in another node or network; None keeps what is declared."""
        return replace(
            self,
            network_gbps=network_gbps or self.network_gbps,
            gpus_per_node=gpus_per_node or self.gpus_per_node,
        )


def _capped(watts: float, design_watts: float) -> float:
    return float((watts / design_watts) ** (1 / 3))


_A100 = "NVIDIA A100 datasheet (2021); DGX A100: eight links of 200 Gb/s"
_H100 = "NVIDIA H100 datasheet (2023); DGX H100: eight links of 400 Gb/s"
_ADA = "NVIDIA Ada architecture whitepaper (2022), fp32 accumulation; PCIe 4.0 x16"
_GA102 = "NVIDIA GA102 whitepaper (2020), fp32 accumulation; PCIe 4.0 x16"

_CARDS = (
    # name, architecture, TFLOP/s, GiB, GB/s, link GB/s, node Gb/s, fp8 ratio, SMs, clock, source
    ("V100-SXM-32GB", "volta", 125.0, 32, 900, 150, 800, 1, 80, 1.0, "NVIDIA V100 datasheet (2018); DGX-2"),
    ("A100-SXM-40GB", "ampere", 312.0, 40, 1555, 300, 1600, 1, 108, 1.0, _A100),
    ("A100-SXM-80GB", "ampere", 312.0, 80, 2039, 300, 1600, 1, 108, 1.0, _A100),
    ("A100-PCIe-80GB", "ampere", 312.0, 80, 1935, 32, 400, 1, 108, 1.0, _A100),
    ("A800-SXM-80GB", "ampere", 312.0, 80, 2039, 200, 1600, 1, 108, 1.0, "as A100, NVLink of 400 GB/s both ways"),
    ("H100-SXM-80GB", "hopper", 989.4, 80, 3350, 450, 3200, 2, 132, 1.0, _H100),
    (
        *("H100-SXM-96GB-HBM2e-500W", "hopper", 989.4, 96, 2400, 450, 3200, 2, 132, _capped(500, 700)),
        "torchtitan's benchmark page (2024): 96 GB of HBM2e, 500 W",
    ),
    ("H100-PCIe-80GB", "hopper", 756.0, 80, 2000, 64, 800, 2, 114, 1.0, _H100),
    ("H800-SXM-80GB", "hopper", 989.4, 80, 3350, 200, 3200, 2, 132, 1.0, "as H100, NVLink of 400 GB/s both ways"),
    ("H20-SXM-96GB", "hopper", 148.0, 96, 4000, 450, 3200, 2, 78, 1.0, "NVIDIA H20 datasheet (2024)"),
    ("H200-SXM-141GB", "hopper", 989.4, 141, 4800, 450, 3200, 2, 132, 1.0, "NVIDIA H200 datasheet (2024)"),
    ("GH200-96GB", "hopper", 989.4, 96, 4000, 450, 800, 2, 132, 1.0, "NVIDIA GH200 datasheet (2023)"),
    ("B200-SXM-180GB", "blackwell", 2250.0, 180, 7700, 900, 3200, 2, 148, 1.0, "NVIDIA DGX B200 datasheet (2024)"),
    ("GB200-186GB", "blackwell", 2500.0, 186, 8000, 900, 1600, 2, 148, 1.0, "NVIDIA GB200 NVL72 datasheet (2024)"),
    ("MI250X-64GB", "cdna2", 191.5, 64, 1638, 100, 800, 1, 110, 1.0, "AMD MI250X datasheet (2021), one of two dies"),
    ("MI300X-192GB", "cdna3", 1307.4, 192, 5300, 448, 3200, 2, 304, 1.0, "AMD MI300X datasheet (2023)"),
    ("L40S-48GB", "ada", 362.0, 48, 864, 32, 400, 2, 142, 1.0, "NVIDIA L40S datasheet (2023); PCIe 4.0 x16"),
    ("A40-48GB", "ampere", 149.7, 48, 696, 32, 200, 1, 84, 1.0, "NVIDIA A40 datasheet (2020); PCIe 4.0 x16"),
    ("A10G-24GB", "ampere", 70.0, 24, 600, 32, 100, 1, 80, 1.0, "AWS G5 instances; PCIe 4.0 x16"),
    ("RTX-A6000-48GB", "ampere", 154.8, 48, 768, 32, 100, 1, 84, 1.0, _GA102),
    ("RTX-4090-24GB", "ada", 165.2, 24, 1008, 32, 100, 2, 128, 1.0, _ADA),
    ("RTX-3090-24GB", "ampere", 71.0, 24, 936, 32, 100, 1, 82, 1.0, _GA102),
)
_FIELDS = (
    *("name", "architecture", "peak_tflops", "memory_gib", "memory_gb_s", "link_gb_s", "network_gbps"),
    *("fp8_ratio", "multiprocessors", "clock_share", "source"),
)

HARDWARE: Mapping[str, Hardware] = {
    card[0]: Hardware(
        **dict(zip(_FIELDS, card, strict=True)),  # type: ignore[arg-type]
        gpus_per_node=4 if card[0].startswith("GB200") else 8,
    )
    for card in _CARDS
}

_USUAL = {"a100": "A100-SXM-80GB", "h100": "H100-SXM-80GB"}
"""Of GPUs that come in several forms, the one that a bare name means."""


def find_hardware(name: str) -> Hardware:
    """A declared GPU by its name or a shorter one: `h100`, `A100-SXM`, `4090`; or with another memory, `B200-192GB`.

    ValueError for others: what is not declared has no peak.
    """
    words = name.lower().replace("nvidia", "").replace("amd", "").replace("_", "-").replace(" ", "-").strip("-")
    exact = next((card for declared, card in HARDWARE.items() if declared.lower() == words), None)
    if exact or words in _USUAL:
        return exact or HARDWARE[_USUAL[words]]
    memory = re.search(r"-(\d+)gb$", words)
    stem = words[: memory.start()] if memory else words
    stem = stem if "-" in stem or stem not in _USUAL else _USUAL[stem].lower().rsplit("-", 1)[0]
    stems = (stem, f"rtx-{stem}")
    family = [card for declared, card in HARDWARE.items() if declared.lower().startswith(tuple(f"{s}-" for s in stems))]
    if not family:
        raise ValueError(f"unknown GPU {name[:60]!r}; declared are {', '.join(HARDWARE)}")
    if memory is None:
        return family[-1] if stem == "a100-sxm" else family[0]
    size = float(memory[1])
    nearest = min(family, key=lambda card: abs(card.memory_gib - size))
    if not 0.5 <= size / nearest.memory_gib <= 2:
        raise ValueError(f"unknown GPU {name[:60]!r}: {nearest.name} is the nearest declared")
    return nearest if size == nearest.memory_gib else replace(nearest, name=name, memory_gib=size)
