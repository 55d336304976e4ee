"""A made-up machine of round numbers, for tests of what is predicted from a calibration."""

from datetime import UTC, datetime

from labkit.costs.calibration import ALL_REDUCE, BURST, MESSAGE, Calibration, Rates, Transport

CALL_S = 1e-6
FLOPS_PER_S = 1e11
BYTES_PER_S = 1e10
ALPHA_S = 1e-4
BETA_S_PER_BYTE = 1e-9


def _curve(per_s, *work):
    return tuple((float(size), CALL_S + size / per_s) for size in work)


def made_up():
    """Operators take a call and their work, in both dtypes; messages take 100 us and a nanosecond
    per byte."""
    products = _curve(FLOPS_PER_S, *(10**k for k in range(3, 13)))
    rates = Rates(
        device="cpu",
        products=dict.fromkeys(("float32", "bfloat16"), products),
        additions=_curve(BYTES_PER_S, *(10**k for k in range(2, 11))),
    )
    transports = tuple(
        Transport(way=way, what=what, ranks=ranks, alpha_s=ALPHA_S, beta_s_per_byte=BETA_S_PER_BYTE)
        for ranks in (2, 4)
        for way in ("gloo", "shared memory")
        for what in (ALL_REDUCE, MESSAGE, BURST)
    )
    fields = {"run": "limits", "measured": datetime(2026, 1, 1, tzinfo=UTC), "machine": "made up"}
    return Calibration(rates=(rates,), transports=transports, **fields)
