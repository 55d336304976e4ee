"""A Transformer so small that ranks spend their time on what is tested: a ninth of the smallest named size."""

from collections.abc import Callable, Iterator
from typing import Any

from labkit.costs.transformer import TransformerShape
from labkit.lab.user_models import registered_models

NAME = "tiny"
TINY = TransformerShape(d_model=64, d_ff=128, n_layers=4, n_heads=2, vocabulary=2000)
MODELS = {NAME: TINY}


def with_tiny(worker: Callable[[Any], Any], point: Any) -> Iterator[Any]:
    """The worker's rows, where points may name the model."""
    with registered_models(MODELS):
        yield from worker(point)
