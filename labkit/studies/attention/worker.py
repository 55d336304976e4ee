"""What is run to measure one point of the attention lab. Imports torch and the instruments only."""

from dataclasses import dataclass

from labkit.studies.shared.attention_passes import COMPILED, EXPLICIT, MARGIN, TILED, PassesPoint, measure_passes

__all__ = ["COMPILED", "EXPLICIT", "IMPLEMENTATIONS", "MARGIN", "TILED", "AttentionPoint", "measure_point"]

IMPLEMENTATIONS = (EXPLICIT, TILED, COMPILED)


@dataclass(frozen=True, kw_only=True)
class AttentionPoint(PassesPoint):
    """Explicit attention and what takes turns with it, without a mask."""

    implementations: tuple[str, ...] = IMPLEMENTATIONS


measure_point = measure_passes
