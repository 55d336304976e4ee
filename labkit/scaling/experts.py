"""Mixtures of experts, which are not predicted: how to know one, and the nearest dense model."""

import math
import re
from collections.abc import Mapping
from typing import Any

_NAMES = re.compile(r"mixtral|moe|\d+x\d+b|-a\d+b\b", re.IGNORECASE)
"""Names of mixtures of experts: Mixtral-8x7B, Qwen3-30B-A3B."""
_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk")
"""Keys of a `config.json` that say how many experts a token uses."""


def is_named(name: str) -> bool:
    """Return whether a model's name says that it has experts."""
    return _NAMES.search(name) is not None


def active_parameters(name: str) -> float | None:
    """Parameters that a token uses, by the name: 30B-A3B says 3 B, 8x7B two experts of 7 B."""
    if active := re.search(r"-a(\d+(?:\.\d+)?)b", name, re.IGNORECASE):
        return 1e9 * float(active[1])
    if experts := re.search(r"\d+x(\d+)b", name, re.IGNORECASE):
        return 2e9 * float(experts[1])
    return None


def dense_config(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The config of a dense model as large as the active part; None for one without experts."""
    key = next((key for key in _PER_TOKEN if isinstance(config.get(key), int)), None)
    if key is None:
        return None
    ffn = config.get("moe_intermediate_size") or config.get("intermediate_size")
    return {**config, "intermediate_size": config[key] * ffn if isinstance(ffn, int) else None}


def refusal_reason(active: float | None, models: Mapping[str, int]) -> str:
    """Return that no mixture is predicted, and the nearest of dense models, by their parameters."""
    reason = "a mixture of experts is not predicted; nearest is a dense model of its active size"
    if active is None:
        return reason
    nearest = min(models, key=lambda name: abs(math.log(models[name] / active)))
    return f"{reason}, {active / 1e9:.2g} B parameters: {nearest}"
