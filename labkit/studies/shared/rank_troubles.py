"""What a reader of times of several ranks must know beside them."""

import pandas as pd

from labkit.lab.findings import troubles
from labkit.lab.rows import select


def rank_troubles(frame: pd.DataFrame, name: str) -> str | None:
    """The caveat on alternatives without a time (`lab.findings.troubles`), and on ranks that share a GPU."""
    is_shared = not select(frame, device="cuda", backend="gloo").empty
    shared = "The ranks share a GPU: this says nothing about scaling." if is_shared else None
    return " ".join(filter(None, [troubles(frame, name), shared])) or None
