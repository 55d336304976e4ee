"""The attention lab: its parameters and the points it measures."""

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field

from labkit.lab import capacity
from labkit.lab.config import Count, Device, Sessions, TimedConfig, TimeoutSeconds, one_of
from labkit.lab.point import repeat_in_sessions
from labkit.lab.study import Study
from labkit.machine import Machine
from labkit.nn.attention_implementations import IMPLEMENTATIONS, register
from labkit.studies.attention.findings import QUESTIONS
from labkit.studies.attention.worker import COMPILED, EXPLICIT, MARGIN, TILED, AttentionPoint, measure_point
from labkit.studies.shared.attention_passes import NEEDS

GIB = 2**30

# below, gradients are sums of so few terms that their relative error means nothing
Length = Annotated[int, Field(ge=16, lt=2**31)]
HeadDim = Annotated[int, Field(ge=1, le=1024)]


class AttentionConfig(TimedConfig):
    """What a reader may set."""

    sequences: Annotated[list[Length], Field(min_length=1)]
    """Tokens of the grid."""
    head_dims: Annotated[list[HeadDim], Field(min_length=1)]
    implementations: list[Annotated[str, one_of(lambda: IMPLEMENTATIONS)]] = [EXPLICIT, TILED, COMPILED]
    """What takes turns; explicit attention, with which all are compared, always does."""
    compiled_sequences: list[Length]
    """Of `sequences`, those at which the compiled version takes part: each shape costs seconds to compile."""
    compiled_head_dims: list[HeadDim]
    tiling_sequences: list[Length]
    """Tokens of the comparison of explicit and tiled attention, one sequence of head dimension 64."""
    memory_sequences: list[Length] = []
    """The same, memory only: too long to be timed often."""
    sessions: Sessions = 2
    """How often each is timed, each time by another process."""
    batch: Count = 8
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: Device = "auto"
    """auto: CUDA if there is a GPU."""
    most_bytes: Annotated[int, Field(ge=0)] = 0
    """Larger problems are left out; 0: only what does not fit into memory is."""
    timeout_s: TimeoutSeconds = 300.0


class AttentionStudy(Study):
    """Time and memory of explicit attention, eager and compiled, and of tiled attention beside it."""

    name = "attention"
    title = "Attention"
    summary = "What explicit attention costs in time and memory, and what compiling or tiling it changes."
    questions = QUESTIONS
    profiles = {
        "smoke": AttentionConfig(
            sequences=[64, 128, 256],
            head_dims=[16, 32],
            compiled_sequences=[],  # a first shape takes 10 s to compile and more
            compiled_head_dims=[],
            tiling_sequences=[512],
            sessions=1,
            batch=2,
            warmup=1,
            repeats=6,
        ),
        "quick": AttentionConfig(
            sequences=[256, 512, 1024, 2048],
            head_dims=[16, 64],
            compiled_sequences=[256, 1024],
            compiled_head_dims=[64],
            tiling_sequences=[2048, 4096],
            memory_sequences=[8192],
            batch=2,
            warmup=1,
            rounds_s=1.2,
            most_bytes=6 * GIB,
        ),
        "standard": AttentionConfig(
            sequences=[256, 512, 1024, 2048, 4096, 8192, 16384],
            head_dims=[16, 64],
            compiled_sequences=[256, 512, 1024, 2048, 4096, 8192, 16384],
            compiled_head_dims=[16, 64],
            tiling_sequences=[1024, 2048, 4096, 8192, 16384],
            timeout_s=600.0,
        ),
        "paper": AttentionConfig(
            sequences=[256, 1024, 4096, 8192, 16384],
            head_dims=[16, 32, 64, 128],
            compiled_sequences=[256, 1024, 4096, 8192, 16384],
            compiled_head_dims=[16, 32, 64, 128],
            tiling_sequences=[4096, 8192, 16384],
            warmup=10,
            repeats=100,
            ratio_within=0.0,
            rounds_s=300.0,
            timeout_s=3600.0,
        ),
    }
    worker = staticmethod(measure_point)
    plugin_parameter = "implementations"
    register = staticmethod(register)

    def points(self, config: AttentionConfig, machine: Machine) -> Sequence[AttentionPoint]:
        """The grid, short sequences first; one long sequence explicit and tiled; the same again; what cannot fit."""
        device = machine.device(config.device)
        points = [
            _point(config, device, "grid", sequence, head_dim)
            for sequence in sorted(config.sequences)
            for head_dim in config.head_dims
        ]
        for sequence in sorted({*config.tiling_sequences, *config.memory_sequences}):
            points.append(_point(config, device, "tiling", sequence, 64))
        further = repeat_in_sessions([point for point in points if point.repeats], config.sessions)
        points += [*further, _too_large(config, device, machine)]
        return list({point.id: point for point in points}.values())

    def skip_reason(self, point: AttentionPoint, machine: Machine) -> str | None:
        """Only where nothing fits; an implementation that does not becomes a row of its point."""
        needed = MARGIN * min(map(point.needed_bytes, point.implementations))
        return capacity.skip_reason(machine, point.device, needed, says=NEEDS)

    def series(self, point: AttentionPoint) -> tuple[Hashable, float]:
        return (point.sweep, point.device, point.batch, point.head_dim), point.sequence


def _point(config: AttentionConfig, device: str, sweep: str, sequence: int, head_dim: int) -> AttentionPoint:
    grid = sweep == "grid"
    batch = config.batch if grid else 1
    compiled = grid and sequence in config.compiled_sequences and head_dim in config.compiled_head_dims
    names = dict.fromkeys([EXPLICIT, *config.implementations])
    return AttentionPoint.of(
        config,
        sweep=sweep,
        batch=batch,
        sequence=sequence,
        head_dim=head_dim,
        device=device,
        implementations=tuple(name for name in names if compiled or name != COMPILED),
        repeats=config.repeats if grid or sequence in config.tiling_sequences else 0,
    )


def _too_large(config: AttentionConfig, device: str, machine: Machine) -> AttentionPoint:
    """The shortest power of two whose explicit attention is larger than the whole memory: a row that says why."""
    for exponent in range(6, 31):
        point = _point(config, device, "grid", 2**exponent, max(config.head_dims))
        if MARGIN * point.needed_bytes(EXPLICIT) > machine.memory_of(device):
            break
    return replace(point, sweep="limit", implementations=(EXPLICIT,))


STUDY = AttentionStudy()
