"""Rates: as many samples as asked for, of the size asked for."""

import math

import pytest
import torch

from labkit.bench import rates


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_matmul_rate_is_flops_over_seconds(monkeypatch, dtype):
    monkeypatch.setattr(rates, "time_interleaved", lambda actions, **_: {name: [0.5, 0.25] for name in actions})
    assert rates.matmul_flops_per_s("cpu", dtype, size=8) == [2 * 8**3 / 0.5, 2 * 8**3 / 0.25]
    assert rates.copy_bytes_per_s("cpu", n_bytes=64) == [2 * 64 / 0.5, 2 * 64 / 0.25]


def test_rates_are_measured():
    samples = [*rates.matmul_flops_per_s("cpu", torch.float32, size=64, repeats=2)]
    samples += rates.copy_bytes_per_s("cpu", n_bytes=2**16, repeats=3)
    assert len(samples) == 5
    assert all(math.isfinite(rate) and rate > 0 for rate in samples)
