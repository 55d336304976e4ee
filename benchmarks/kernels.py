"""Resources and bounds of the flash kernels' tiles on GPUs that need not be present: compiles,
launches nothing.

    python benchmarks/kernels.py     # all tiles, for sm_80, 86, 89, 90, 100 and 120
    python benchmarks/kernels.py --capability 90 --kernel grad_kv --head-dim 128 --tile 64,128,8,2

A tile is block_q,block_k,warps,stages (and specialize, ahead; see `flash_tiles.py`). Columns:
registers per thread; spill instructions inside and outside of loops; KiB of shared memory per
block; columns of tensor memory; blocks per multiprocessor; instructions of the main loop per tile
and warp; the unit that bounds the loop; and two bounds in TFLOP/s, of the GPU named in `CHIPS`.
The overlapped bound is that of the busiest unit alone. In the serial bound all warps are in step,
as barriers hold them: other units work beside the tensor cores only where the code does not wait
for them. Both are nan, and the unit unknown, for warps that specialize on sm_100: there several
groups of warps share a trip, each in a loop of its own. Exits 1 if a tile spills in a loop or
exceeds shared or tensor memory.

Triton compiles for any target; its wheel holds `nvdisasm` and `cuobjdump`, which read the machine
code. Rates: CUDA C++ programming guide, arithmetic instructions by compute capability.
"""

import argparse
import math
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from itertools import groupby, product
from pathlib import Path
from typing import Any, NamedTuple

import networkx
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from labkit.nn.flash_backward_kernels import delta_kernel
from labkit.nn.flash_launch import KERNELS as TILED_KERNELS
from labkit.nn.flash_launch import kernel_constants
from labkit.nn.flash_tiles import Tile, tiles_for

KERNELS: dict[str, Any] = {**TILED_KERNELS, "delta": delta_kernel}
# per tile, each 2 * block_q * block_k * head_dim
MATMULS = {"forward": 2, "grad_kv": 4, "grad_q": 3, "delta": 0}
POINTERS = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"}
TENSOR_COLUMNS = 512
BINARIES = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class Chip(NamedTuple):
    """Per multiprocessor: KiB of shared memory in all and per block, threads; FLOP per clock, dense
    bfloat16.

    `tflops` is the data sheet's peak of a GPU. `alu_clocks` and `fp32_clocks` are the clocks that a
    warp's instruction takes on a quarter of it.
    """

    shared_kib: int
    block_kib: int
    threads: int
    flop_per_clock: int
    tflops: float
    fp32_clocks: int
    alu_clocks: int = 2


CHIPS = {
    80: Chip(164, 163, 2048, 2048, 312, 2),  # A100
    86: Chip(100, 99, 1536, 1024, 149.7, 1),  # A40
    89: Chip(100, 99, 1536, 1024, 362, 1),  # L40S; a GeForce has half of it
    90: Chip(228, 227, 2048, 4096, 989, 1),  # H100 SXM
    100: Chip(228, 227, 2048, 8192, 2250, 1),  # B200
    120: Chip(100, 99, 1536, 512, 209, 1, alu_clocks=1),  # RTX 5090
}


class Resources(NamedTuple):
    """One compiled kernel: per thread, per block for memory, per tile and warp for
    `instructions`."""

    registers: int
    spills_in_loops: int
    spills_outside: int
    shared_bytes: int
    tensor_columns: int
    blocks: int
    instructions: int
    bound: str
    overlapped: float
    serial: float

    def faults(self, capability: int) -> list[str]:
        """Reasons against shipping this tile."""
        faults = []
        # Outside of loops a spill costs a few instructions per block, and counts for nothing.
        if self.spills_in_loops:
            faults.append(f"{self.spills_in_loops} spills in loops")
        if self.shared_bytes > CHIPS[capability].block_kib * 1024:
            faults.append("too much shared memory")
        if self.tensor_columns > TENSOR_COLUMNS:
            faults.append("too much tensor memory")
        return faults


def compile_tile(
    kernel: str,
    tile: Tile,
    *,
    head_dim: int,
    dtype: torch.dtype,
    causal: bool,
    capability: int,
    group: int = 1,
) -> Resources:
    """Compile `kernel` ("forward", "delta", "grad_kv" or "grad_q") for sm_<capability> and read its
    machine code."""
    compiled = triton.compile(
        _source(
            kernel,
            tile,
            kernel_constants(head_dim, dtype, causal, group=group, interpreted=False),
            dtype,
        ),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": tile.warps, "num_stages": tile.stages},
    )
    facts = compiled.metadata
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        registers = int(
            re.findall(r"REG:(\d+)", _run("cuobjdump", "--dump-resource-usage", file.name))[-1]
        )
        flow = _read_code(_run("nvdisasm", "-c", file.name))
    loops = _loops(flow)
    spills = {
        index for index, name in flow.nodes(data="name") if name.split(".")[0] in ("LDL", "STL")
    }
    inside = spills & set().union(*loops)
    nodes = [[flow.nodes[index] for index in sorted(loop)] for loop in loops]
    main = max(
        nodes,
        key=lambda loop: (sum(one["unit"] == "tensor" for one in loop), -len(loop)),
        default=[],
    )
    flop = 2 * MATMULS[kernel] * tile.block_q * tile.block_k * head_dim
    # Two groups of warps, of half the queries each.
    computing = 2 * tile.warps if tile.specialize == 2 else tile.warps
    bounds = Bounds(main, computing, flop, dtype, CHIPS[capability])
    tensor_columns = int(getattr(facts, "tmem_size", 0) or 0)
    if tile.specialize and tensor_columns:
        # Products, softmax and rescaling are loops of different warps, which wait for each other:
        # how often each runs per block is not in the code of any one of them.
        bounds.unit = "unknown"
        bounds.overlapped = math.nan
        bounds.serial = math.nan
    return Resources(
        registers=registers,
        spills_in_loops=len(inside),
        spills_outside=len(spills - inside),
        shared_bytes=facts.shared,
        tensor_columns=tensor_columns,
        blocks=_blocks(
            CHIPS[capability],
            registers,
            facts.shared,
            getattr(facts, "ws_num_warps", 0) or facts.num_warps,
        ),
        instructions=len(main),
        bound=bounds.unit,
        overlapped=bounds.overlapped,
        serial=bounds.serial,
    )


def _source(kernel: str, tile: Tile, constants: dict[str, Any], dtype: torch.dtype) -> ASTSource:
    function = KERNELS[kernel]
    defaults = {one.name: one.default for one in function.params if one.has_default}
    constants = {
        name: value
        for name, value in (defaults | constants | tile.constants()).items()
        if name in function.arg_names
    }
    types = dict.fromkeys(constants, "constexpr") | {
        "logsumexp_ptr": "*fp32",
        "delta_ptr": "*fp32",
        "scale": "fp32",
    }
    signature = {
        name: types.get(name, POINTERS[dtype] if "_ptr" in name else "i32")
        for name in function.arg_names
    }
    # Tensors from PyTorch's allocator are aligned; unless that is said, loads are not pipelined.
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(signature)
        if name.endswith("_ptr")
    }
    return ASTSource(function, signature, constants, aligned)


def _run(program: str, *arguments: str) -> str:
    return subprocess.run(
        [BINARIES / program, *arguments], check=True, capture_output=True, text=True
    ).stdout


# ------------------------------------------------------------------------------------ machine code


def _read_code(listing: str) -> networkx.DiGraph:
    """The flow of control: a node per instruction, with its text, its name without predicate, and
    its unit."""
    texts: list[str] = []
    labels: dict[str, int] = {}
    for line in listing.splitlines():
        label = re.match(r"(\.L_x_\d+):", line)
        instruction = re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line)
        if label:
            labels[label[1]] = len(texts)
        elif instruction:
            texts.append(instruction[1])
    flow = networkx.DiGraph()
    for index, text in enumerate(texts):
        name = re.sub(r"^@!?U?P\w+\s+", "", text).split(" ")[0]
        unit = next((unit for unit, pattern in UNITS.items() if re.match(pattern, name)), "other")
        flow.add_node(index, text=text, name=name, unit=unit)
        jump = re.search(r"`\((\.L_x_\d+)\)", text) if name.startswith("BRA") else None
        always = re.match(r"(BRA(\.\S+)? `|EXIT|RET|BRX)", text)
        ends = (labels.get(jump[1]) if jump else None, None if always else index + 1)
        flow.add_edges_from((index, end) for end in ends if end in range(len(texts)))
    return flow


def _loops(flow: networkx.DiGraph) -> list[set[int]]:
    """Innermost loops that compute: cycles inside a loop are those that do not pass its entry.

    Specialized warps wait for work in a loop around their programs, and the heads of a group are a
    loop around those over blocks.
    """
    loops = _cycles(flow)
    entries = {end for loop in loops for start, end in flow.in_edges(loop) if start not in loop}
    return [inner for loop in loops for inner in _cycles(flow.subgraph(loop - entries)) or [loop]]


def _cycles(flow: networkx.DiGraph) -> list[set[int]]:
    """Strongly connected parts of several instructions that use tensor cores or exponentials."""
    parts = networkx.strongly_connected_components(flow)
    units = ("tensor", "special")
    return [
        set(part)
        for part in parts
        if len(part) > 1 and any(flow.nodes[i]["unit"] in units for i in part)
    ]


UNITS = {
    "tensor": r"[HQ]MMA|HGMMA|UTC\wMMA",
    "special": r"MUFU",
    "fp32": r"F(FMA|MUL|ADD)|IMAD|MOV",
    "alu": r"F(MNMX|SEL|SET|SETP)|F2F|IADD|VIADD|LOP|LEA|SHF|SEL|ISETP|PRMT|PLOP|VIMNMX|IMNMX|IABS",
    "shared": r"LDS|STS|LDGSTS|SHFL",
}


class Bounds:
    """TFLOP/s that one trip of a loop allows, and the unit that is busy longest."""

    def __init__(
        self, loop: list[Any], warps: int, flop: int, dtype: torch.dtype, chip: Chip
    ) -> None:
        # Float32 as three products in TF32, each at half the rate.
        self._slow = 2 * 3 if dtype == torch.float32 else 1
        self._chip = chip
        self._warps = warps
        self.unit = "memory"
        self.overlapped = 0.0
        self.serial = 0.0
        if not loop or not flop:
            return
        self._tensor_clocks = flop * self._slow / chip.flop_per_clock
        clocks = {"tensor": self._tensor_clocks, **self._other_clocks(loop)}
        self.unit = max(clocks, key=lambda unit: clocks[unit])
        per_clock = self._tensor_clocks * chip.tflops / self._slow
        self.overlapped = per_clock / clocks[self.unit]
        self.serial = min(self.overlapped, per_clock / self._serial_clocks(loop))

    def _other_clocks(self, instructions: Iterable[Any]) -> dict[str, float]:
        instructions = list(instructions)
        kinds = Counter(one["unit"] for one in instructions)
        quarter = self._warps / 4
        moved = sum(_shared_bytes(one["name"], one["text"]) for one in instructions)
        return {
            "shared": moved * self._warps / 128,
            "issue": len(instructions) * quarter,
            "special": 8 * kinds["special"] * quarter,
            "fp32": self._chip.fp32_clocks * kinds["fp32"] * quarter,
            "alu": self._chip.alu_clocks * kinds["alu"] * quarter,
        }

    def _serial_clocks(self, loop: list[Any]) -> float:
        """Clocks of a trip in which all warps are in step."""
        products = [one for one in loop if one["unit"] == "tensor"]
        if not products[0]["name"].startswith("HGMMA"):
            # Results are in registers, or waited for by a barrier in memory: no wait to be read.
            others = [one for one in loop if one["unit"] != "tensor"]
            return self._tensor_clocks + max(self._other_clocks(others).values())
        sizes = [math.prod(map(int, re.findall(r"\d+", one["name"])[:3])) for one in products]
        scale = self._tensor_clocks / sum(sizes)
        now = 0.0
        free = 0.0  # when the tensor cores have nothing left
        groups: list[float] = []  # when each group of products that may be waited for is done
        starts = []
        # The last of four trips counts: the first ones fill the queue.
        for _ in range(4):
            starts.append(now)
            for unit, part in groupby(loop, key=_segment):
                instructions = list(part)
                if unit == "tensor":
                    for one in instructions:
                        size = math.prod(map(int, re.findall(r"\d+", one["name"])[:3]))
                        free = max(free, now) + scale * size
                        if "gsb" in one["text"]:
                            groups.append(free)
                elif unit == "wait":
                    pending = int(instructions[0]["text"].split(",")[-1], 16)
                    done = groups[: len(groups) - pending]
                    now = max([now, *done])
                else:
                    now += max(self._other_clocks(instructions).values())
        return now - starts[-1]


def _segment(instruction: Any) -> str:
    if instruction["name"].startswith("WARPGROUP.DEPBAR"):
        return "wait"
    return "tensor" if instruction["unit"] == "tensor" else "other"


def _shared_bytes(name: str, text: str) -> float:
    """Bytes of shared memory that a warp moves by one instruction."""
    product = re.match(r"HGMMA\.(\d+)x(\d+)x(\d+)", name)
    if product:
        rows, columns, depth = map(int, product.groups())
        # The right operand is always in shared memory, the left one may be in registers.
        from_registers = re.search(r"HGMMA\S* R\d+, R\d+", text) is not None
        lines = columns if from_registers else columns + rows
        item_bytes = 4 if "TF32" in name else 2
        return item_bytes * depth * lines / 4  # four warps make one product
    if not re.match(r"LDS|STS|LDGSTS|SHFL", name):
        return 0
    # 32 threads move 16, 8 or 4 bytes each.
    if re.search(r"LDGSTS|\.4|\.128", name):
        return 512
    if re.search(r"\.2|\.64", name):
        return 256
    return 128


def _blocks(chip: Chip, registers: int, shared_bytes: int, warps: int) -> int:
    """Blocks that fit a multiprocessor, by registers, shared memory (1 KiB each is the system's)
    and threads."""
    per_warp = -(-registers * 32 // 256) * 256
    return min(
        65536 // (per_warp * warps),
        chip.shared_kib * 1024 // (shared_bytes + 1024),
        chip.threads // (32 * warps),
    )


# ------------------------------------------------------------------------------------------- table


COLUMNS = (
    "target dtype kernel dim tile registers in_loops outside KiB tensor blocks instructions bound"
    " overlapped serial"
)
ROW = "{:7}{:9}{:8}{:<4}{!s:22}{:<10}{:<9}{:<8}{:<5}{:<7}{:<7}{:<13}{:8}{:<11}{:<6}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--capability", nargs="+", type=int, choices=list(CHIPS), default=list(CHIPS)
    )
    parser.add_argument(
        "--dtype",
        nargs="+",
        choices=["bfloat16", "float16", "float32"],
        default=["bfloat16", "float32"],
    )
    parser.add_argument("--kernel", nargs="+", choices=list(KERNELS), default=list(TILED_KERNELS))
    parser.add_argument("--head-dim", nargs="+", type=int, default=[32, 64, 128, 256])
    parser.add_argument("--tile", nargs="+", type=lambda text: Tile(*map(int, text.split(","))))
    parser.add_argument("--full", action="store_true", help="without the causal mask")
    options = parser.parse_args()
    print(re.sub("<|!s", "", ROW).format(*COLUMNS.split()))
    wrong = 0
    for problem in product(options.capability, options.dtype, options.kernel, options.head_dim):
        capability, name, kernel, head_dim = problem
        sizes: dict[str, Any] = {"head_dim": head_dim, "dtype": getattr(torch, name)}
        for tile in options.tile or tiles_for(kernel, capability=divmod(capability, 10), **sizes):
            resources = compile_tile(
                kernel, tile, causal=not options.full, capability=capability, **sizes
            )
            faults = resources.faults(capability)
            wrong += bool(faults)
            kib = round(resources.shared_bytes / 1024)
            cells = resources._replace(
                shared_bytes=kib,
                overlapped=f"{resources.overlapped:.0f}",
                serial=f"{resources.serial:.0f}",
            )
            print(ROW.format(f"sm_{capability}", *problem[1:], tile, *cells), *faults, flush=True)
    print(f"{wrong} tiles spill in a loop or do not fit")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
