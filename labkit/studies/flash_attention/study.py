"""The FlashAttention lab: its parameters and the points it measures."""

from collections.abc import Hashable, Iterator, Sequence
from typing import Annotated, Literal

from pydantic import Field

from labkit.lab import capacity
from labkit.lab.config import Device, Sessions, TimedConfig, TimeoutSeconds, one_of
from labkit.lab.point import repeat_in_sessions
from labkit.lab.study import Study
from labkit.machine import Machine
from labkit.nn.attention_implementations import IMPLEMENTATIONS, register
from labkit.studies.flash_attention.findings import QUESTIONS
from labkit.studies.flash_attention.worker import FlashPoint, measure_point
from labkit.studies.shared.attention_passes import COMPILED, FLASH, MARGIN, NEEDS, TILED

MIB = 2**20

Dtype = Literal["float32", "bfloat16", "float16"]
Name = Annotated[str, one_of(lambda: IMPLEMENTATIONS)]
# below 16, gradients are sums of so few terms that their relative error means nothing
Length = Annotated[int, Field(ge=16, lt=2**31)]
HeadDim = Annotated[int, Field(ge=1, le=1024)]


class FlashConfig(TimedConfig):
    """What a reader may set."""

    sequences: Annotated[list[Length], Field(min_length=1)]
    head_dims: Annotated[list[HeadDim], Field(min_length=1)]
    dtypes: Annotated[list[Dtype], Field(min_length=1)] = ["float32", "bfloat16"]
    implementations: Annotated[list[Name], Field(min_length=1)] = [
        "explicit",
        "compiled",
        "tiled",
        "flash",
        "sdpa",
        "sdpa_flash",
        "sdpa_efficient",
        "sdpa_cudnn",
    ]
    """sdpa_math, unfused, is measured only if named: it is the yardstick of the gate."""
    compiled_sequences: list[Length]
    """Of `sequences`, those at which the compiled version takes part: each shape costs seconds to compile."""
    technique_sequences: list[Length]
    """Tokens at which the techniques of the kernel are left out one by one."""
    sessions: Sessions = 2
    """How often each length is measured, each time by another process."""
    device: Device = "auto"
    """auto: CUDA if there is a GPU."""
    most_bytes: Annotated[int, Field(ge=0)] = 0
    """An implementation that needs more is left out; 0: only what does not fit into memory is."""
    timeout_s: TimeoutSeconds = 300.0


class FlashStudy(Study):
    """Which implementation of causal attention is fastest here, from which length on, and why."""

    name = "flash_attention"
    title = "FlashAttention"
    summary = "Every implementation of causal attention that runs here: which to use, and from which length on."
    questions = QUESTIONS
    profiles = {
        "smoke": FlashConfig(
            sequences=[64, 256],
            head_dims=[32],
            compiled_sequences=[],  # a first shape takes 10 s to compile and more
            technique_sequences=[256],
            sessions=1,
            warmup=1,
            repeats=6,
        ),
        "quick": FlashConfig(
            sequences=[128, 512, 1024, 2048, 4096],
            head_dims=[64],
            compiled_sequences=[],  # which the attention lab has
            technique_sequences=[4096],
            warmup=1,
            rounds_s=1.0,
            most_bytes=512 * MIB,
        ),
        "standard": FlashConfig(
            sequences=[128, 512, 1024, 2048, 4096, 8192, 16384],
            head_dims=[64, 128],
            compiled_sequences=[512, 2048, 8192],
            technique_sequences=[4096, 16384],
            timeout_s=600.0,
        ),
        "paper": FlashConfig(
            sequences=[2**k for k in range(7, 17)],
            head_dims=[16, 32, 64, 128],
            compiled_sequences=[2**k for k in range(7, 17)],
            technique_sequences=[4096, 16384, 65536],
            warmup=3,
            ratio_within=0.0,
            rounds_s=300.0,
            timeout_s=3600.0,
        ),
    }
    worker = staticmethod(measure_point)
    plugin_parameter = "implementations"
    register = staticmethod(register)

    def points(self, config: FlashConfig, machine: Machine) -> Sequence[FlashPoint]:
        """All lengths, what the techniques of the kernel are worth, then the lengths again, from the last one on."""
        device = machine.device(config.device)
        lengths = list(_lengths(config, device))
        points = [*lengths, *_techniques(config, device), *repeat_in_sessions(lengths, config.sessions)]
        return list({point.id: point for point in points}.values())

    def skip_reason(self, point: FlashPoint, machine: Machine) -> str | None:
        """Only where nothing fits; an implementation that does not becomes a row of its point."""
        needed = MARGIN * min(map(point.needed_bytes, point.implementations))
        return capacity.skip_reason(machine, point.device, needed, says=NEEDS)

    def series(self, point: FlashPoint) -> tuple[Hashable, float]:
        return (point.sweep, point.device, point.dtype, point.head_dim), point.sequence


def _lengths(config: FlashConfig, device: str) -> Iterator[FlashPoint]:
    for dtype in config.dtypes:
        for sequence in sorted(config.sequences):
            names = tuple(n for n in config.implementations if n != COMPILED or sequence in config.compiled_sequences)
            for head_dim in config.head_dims:
                yield _point(config, device, "lengths", dtype, sequence, head_dim, names)


def _techniques(config: FlashConfig, device: str) -> Iterator[FlashPoint]:
    """Of the kernel in the dtype it was made for, and of tiled attention in float32."""
    dtype = next((name for name in config.dtypes if name != "float32"), config.dtypes[0])
    head_dim = max(config.head_dims)
    for sequence in config.technique_sequences:
        yield _point(config, device, "techniques", dtype, sequence, head_dim, (FLASH,))
        yield _point(config, device, "hidden", "float32", sequence, head_dim, (TILED,))


def _point(
    config: FlashConfig, device: str, sweep: str, dtype: str, sequence: int, head_dim: int, names: tuple[str, ...]
) -> FlashPoint:
    return FlashPoint.of(
        config,
        sweep=sweep,
        sequence=sequence,
        head_dim=head_dim,
        dtype=dtype,
        device=device,
        implementations=names,
    )


STUDY = FlashStudy()
