"""A point of the lab on model parallelism: one width, pipeline, or comparison of axes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from labkit.costs.transformer import SIZES, TransformerShape, n_parameters
from labkit.lab.point import ModelPoint
from labkit.parallel.ranks.torchrun import ranks_here
from labkit.parallel.transport import SHARED
from labkit.studies.shared.alternatives import ALL_CORES

if TYPE_CHECKING:
    from labkit.machine.description import Machine

DATA = "data parallel"
WHOLE = "one rank"
TORCH = "torch"
SEQUENCE = ", sequence parallel"
# The whole model on one rank; tensor parallelism by transport, with sequence parallelism and
# without.
WAYS = (ALL_CORES, WHOLE, TORCH, SHARED, TORCH + SEQUENCE, SHARED + SEQUENCE)
# Tensor parallelism divides heads: over 2, 4 or 8 ranks, as the profiles have.
HEADS = 8
# Small, so that the layers, which are split, cost most.
VOCABULARY = 128
# Of AdamW. Ranks add gradients in another order than one process: with `eps` below their rounding,
# the sign of noise would decide an update.
SETTINGS: Mapping[str, Any] = {"lr": 1e-3, "eps": 1e-5}
LEAST_TASK_S = 0.005  # of a forward pass through a stage, so that messages hide no bubble
COPIES = 5  # of the parameters per alternative: parameters, gradients, two states, messages


@dataclass(frozen=True, kw_only=True)
class ModelParallelPoint(ModelPoint):
    """A model, a batch, and alternatives: transports, schedules or axes."""

    sweep: str
    alternatives: tuple[str, ...]
    widths: tuple[int, ...] = ()
    """Width of the model; a pipeline takes the first one whose stages take long enough."""
    layers: int = 2
    model: str = ""
    """A named size, instead of widths and layers."""
    micro_batches: tuple[int, ...] = ()

    @property
    def shape(self) -> TransformerShape:
        """The named size, or the widest model."""
        d = max(self.widths, default=2 * HEADS)
        wide = TransformerShape(
            d_model=d, d_ff=4 * d, n_layers=self.layers, n_heads=HEADS, vocabulary=VOCABULARY
        )
        return SIZES.get(self.model, wide)

    @property
    def needed_bytes(self) -> float:
        """Memory of a rank for the reference and all alternatives."""
        trainers = len(self.alternatives)
        copies: float = COPIES
        if self.sweep == "pipeline":
            trainers *= len(self.micro_batches)
            # Each rank builds the whole model and trains its stages.
            copies = 1 + (COPIES - 1) / self.world_size
        return 4 * n_parameters(self.shape) * (COPIES + copies * trainers)

    def skip_reason(self, machine: "Machine") -> str | None:
        if (
            self.sweep == "pipeline"
            and self.device == "cpu"
            and ranks_here(self.world_size) > machine.cores
        ):
            return "more ranks than cores: their time slices would be measured"
        return super().skip_reason(machine)
