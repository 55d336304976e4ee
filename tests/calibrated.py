"""A made-up machine of round numbers, for tests of what is predicted from a calibration."""

from datetime import UTC, datetime

from labkit.costs.calibration import ALL_REDUCE, BURST, MESSAGE, Calibration, Rates, Transport

CALL_S, FLOPS_PER_S, BYTES_PER_S = 1e-6, 1e11, 1e10
ALPHA_S, BETA_S_PER_BYTE = 1e-4, 1e-9


def _curve(per_s, *work, call_s=CALL_S):
    return tuple((float(size), call_s + size / per_s) for size in work)


def made_up(*, cores=2, ranks=(1, 2), flops_per_s=FLOPS_PER_S, bytes_per_s=BYTES_PER_S, call_s=CALL_S):
    """p ranks reach a p-th of the rates each, in both dtypes; messages take 100 us and a nanosecond per byte."""
    rates = tuple(
        Rates(
            device="cpu",
            ranks=p,
            products=dict.fromkeys(
                ("float32", "bfloat16"), _curve(flops_per_s / p, *(10**k for k in range(3, 13)), call_s=call_s)
            ),
            additions=_curve(bytes_per_s / p, *(10**k for k in range(2, 11)), call_s=call_s),
        )
        for p in ranks
    )
    transports = tuple(
        Transport(way=way, what=what, ranks=2, alpha_s=ALPHA_S, beta_s_per_byte=BETA_S_PER_BYTE)
        for way in ("gloo", "shared memory")
        for what in (ALL_REDUCE, MESSAGE, BURST)
    )
    fields = {"run": "limits", "measured": datetime(2026, 1, 1, tzinfo=UTC), "machine": "made up", "threads": cores}
    return Calibration(cores=cores, rates=rates, transports=transports, **fields)
