"""A made-up machine of round numbers, for tests of what is predicted from a calibration."""

from datetime import UTC, datetime

from labkit.costs.calibration import ALL_REDUCE, BURST, MESSAGE, Calibration, Transport

ALPHA_S, BETA_S_PER_BYTE = 1e-4, 1e-9


def made_up(*, cores=2):
    """Messages take 100 us and a nanosecond per byte."""
    transports = tuple(
        Transport(way=way, what=what, ranks=2, alpha_s=ALPHA_S, beta_s_per_byte=BETA_S_PER_BYTE)
        for way in ("gloo", "shared memory")
        for what in (ALL_REDUCE, MESSAGE, BURST)
    )
    fields = {"run": "limits", "measured": datetime(2026, 1, 1, tzinfo=UTC), "machine": "made up"}
    return Calibration(cores=cores, transports=transports, **fields)
