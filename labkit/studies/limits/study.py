"""The limits lab: its parameters and the points it measures."""

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

import pandas as pd
from pydantic import Field

from labkit.costs.calibration import ALL_REDUCE, DOUBLING, NCCL
from labkit.lab import capacity
from labkit.lab.agreement import AllReduceTime, Known, ProductTime
from labkit.lab.config import Count, Device, TimedConfig, TimeoutSeconds, one_of
from labkit.lab.rows import select
from labkit.lab.study import Study
from labkit.machine import Machine
from labkit.nn.transformer import SIZES
from labkit.studies.limits.exchange import GLOO, SHARED_MEMORY
from labkit.studies.limits.findings import QUESTIONS
from labkit.studies.limits.worker import LimitPoint, measure_point

KIB, MIB = 2**10, 2**20
Model = Annotated[str, one_of(lambda: SIZES)]
Dtype = Literal["float32", "float64", "bfloat16", "float16"]
# A product of this size, and arrays of so many bytes, keep all threads busy and fit nowhere but in memory.
THREADED = (1024, 64 * MIB)

_ALL_REDUCES = {
    (GLOO, ALL_REDUCE): {"algorithm": "torch", "over": "gloo"},
    (NCCL, ALL_REDUCE): {"algorithm": "torch", "over": "nccl"},
    (GLOO, DOUBLING): {"algorithm": "recursive_doubling", "over": "messages"},
    (SHARED_MEMORY, ALL_REDUCE): {"algorithm": "chosen", "over": "shared"},
}
"""What the lab all_reduce calls them."""
# What is measured against itself: rows of a product, bytes of an addition and of an all-reduce between so many ranks;
# in as many rounds as most labs have.
OF_ITSELF, FEW_RANKS, REPEATS_OF_ITSELF = (512, 2**20), 2, 20


class LimitsConfig(TimedConfig):
    """What a reader may set."""

    matmul_sizes: Annotated[list[Annotated[int, Field(ge=8, le=2**15)]], Field(min_length=1)]
    """Rows of square matrices."""
    dtypes: Annotated[list[Dtype], Field(min_length=1)] = ["float32", "bfloat16"]
    copy_sizes_bytes: Annotated[list[Count], Field(min_length=1)]
    """Arrays that are copied and added."""
    exchange_sizes_bytes: list[Count]
    """Messages between ranks."""
    ranks: list[Annotated[int, Field(ge=2, le=64)]] = [2, 4]
    """How many send messages; as many as have a core each also multiply and add at once."""
    model: Model = "mini"
    """Whose operators are timed, for the roofline."""
    batch: Count = 4
    context_length: Count = 128
    device: Device = "auto"
    timeout_s: TimeoutSeconds = 300.0


class LimitsStudy(Study):
    """Rates of products, memory, calls, threads, ranks and messages; the operators of a step beside them."""

    name = "limits"
    title = "The limits of this machine"
    summary = (
        "What this machine can do at best: arithmetic, memory, calls, threads, messages; and which limit binds what."
    )
    questions = QUESTIONS
    profiles = {
        "smoke": LimitsConfig(
            matmul_sizes=[32, 128],
            copy_sizes_bytes=[64, 64 * KIB],
            exchange_sizes_bytes=[KIB, 64 * KIB],
            model="nano",
            context_length=32,
            repeats=6,
        ),
        "quick": LimitsConfig(
            matmul_sizes=[16, 32, 64, 128, 256, 512, 1024, 2048],
            copy_sizes_bytes=[64, *(KIB * 4**k for k in range(10))],
            exchange_sizes_bytes=[KIB, 16 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB],
            warmup=1,
            rounds_s=1.5,
        ),
        "standard": LimitsConfig(
            matmul_sizes=[16, 32, 64, 128, 256, 512, 1024, 2048, 4096],
            dtypes=["float32", "float64", "bfloat16", "float16"],
            copy_sizes_bytes=[64, *(KIB * 2**k for k in range(20))],
            exchange_sizes_bytes=[KIB * 4**k for k in range(9)],
            model="small",
        ),
        "paper": LimitsConfig(
            matmul_sizes=[16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192],
            dtypes=["float32", "float64", "bfloat16", "float16"],
            copy_sizes_bytes=[64, *(KIB * 2**k for k in range(21))],
            exchange_sizes_bytes=[KIB * 4**k for k in range(10)],
            model="large",
            context_length=512,
            ratio_within=0.0,
            rounds_s=300.0,
            timeout_s=1200.0,
        ),
    }
    worker = staticmethod(measure_point)

    def points(self, config: LimitsConfig, machine: Machine) -> Sequence[LimitPoint]:
        """On the device: products, memory, operators; on the CPU: threads, ranks, and messages between them.

        Between GPUs also NCCL's messages, where each rank has one.
        """
        device = machine.device(config.device)
        sizes, bytes_ = tuple(config.matmul_sizes), tuple(config.copy_sizes_bytes)
        on_cpu: dict[str, Any] = {"device": "cpu", "dtype": "float32"}
        threaded = (min(THREADED[0], max(sizes)), min(THREADED[1], max(bytes_)))
        points = [
            *(
                LimitPoint.of(config, sweep="products", device=device, dtype=name, sizes=sizes)
                for name in config.dtypes
            ),
            LimitPoint.of(config, sweep="memory", device=device, sizes=bytes_),
            LimitPoint.of(config, sweep="operators", device=device),
            LimitPoint.of(config, sweep="threads", sizes=threaded, **on_cpu),
        ]
        # what a CPU does is asked of every machine: its ranks are there that gloo and shared memory connect
        for ranks in sorted({1, *config.ranks}):
            on_cpu |= {"world_size": ranks, "backend": "gloo" if ranks > 1 else None}
            if ranks <= max(machine.cores, 2):
                for sweep, all_, most in (("products", sizes, threaded[0]), ("memory", bytes_, threaded[1])):
                    fit = all_ if (ranks, device) == (1, "cpu") else tuple(n for n in all_ if n <= most)
                    points.append(LimitPoint.of(config, sweep=sweep, **on_cpu | {"sizes": fit}))
            if ranks <= FEW_RANKS:
                where = on_cpu if ranks > 1 else on_cpu | {"device": device}
                # as many rounds as were asked for: there is nothing to be found out early
                all_rounds: dict[str, Any] = {"repeats": max(config.repeats, REPEATS_OF_ITSELF)}
                all_rounds |= {"ratio_within": 0.0, "rounds_s": None}
                points.append(LimitPoint.of(config, sweep="itself", sizes=OF_ITSELF, **where | all_rounds))
                points.append(LimitPoint.of(config, sweep="autograd", sizes=(threaded[1],), **on_cpu | all_rounds))
            if ranks > 1 and config.exchange_sizes_bytes:
                messages = tuple(config.exchange_sizes_bytes)
                points.append(LimitPoint.of(config, sweep="exchange", sizes=messages, **on_cpu))
                if machine.backend(device, ranks) == "nccl":
                    on_gpus = on_cpu | {"device": device, "backend": "nccl"}
                    points.append(LimitPoint.of(config, sweep="exchange", sizes=messages, **on_gpus))
        return list({point.id: point for point in points}.values())

    def known(self, frame: pd.DataFrame) -> Iterable[Known]:
        products = select(frame, ["seconds", "size"], sweep="products").dropna(subset="size")
        yield Known(ProductTime, products, "products")
        threaded = select(frame, ["seconds", "threads", "flops"], sweep="threads", operation="product")
        threaded = threaded[threaded["threads"] == threaded["threads"].max()]
        sizes = [round((flops / 2) ** (1 / 3)) for flops in threaded["flops"]]
        yield Known(ProductTime, threaded.assign(size=sizes), "threads")
        for (way, what), named in _ALL_REDUCES.items():
            yield Known(AllReduceTime, select(frame, ["seconds"], sweep="exchange", way=way, what=what).assign(**named))

    def skip_reason(self, point: LimitPoint, machine: Machine) -> str | None:
        largest = max(point.sizes, default=0)
        needed = point.world_size * 3 * (8 * largest**2 if point.sweep == "products" else largest)
        return capacity.skip_reason(machine, point.device, needed)


STUDY = LimitsStudy()
