"""Peak memory against allocations of known size."""

import sys

import pytest
import torch

from labkit.bench.memory import peak_memory_growth

MIB = 2**20


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's /proc")
def test_a_temporary_allocation_is_seen_after_it_is_gone():
    with peak_memory_growth() as memory:
        torch.ones(64 * MIB, dtype=torch.uint8)
    assert 60 * MIB < memory.growth_bytes < 80 * MIB


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's /proc")
def test_an_earlier_peak_does_not_count():
    torch.ones(128 * MIB, dtype=torch.uint8)
    with peak_memory_growth() as memory:
        torch.ones(8 * MIB, dtype=torch.uint8)
    assert memory.growth_bytes < 30 * MIB


@pytest.mark.gpu
def test_cuda_peak_is_exact():
    with peak_memory_growth("cuda") as memory:
        torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    assert memory.growth_bytes == 64 * MIB
