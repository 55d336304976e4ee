"""The allocator's record against tensors of known size."""

import pytest
import torch

from labkit.bench.allocator import record_allocations

MIB = 2**20


def test_the_peak_of_a_window_counts_what_was_there_and_what_came():
    with record_allocations("cpu") as record:
        kept = torch.empty(2 * MIB, dtype=torch.uint8)
        with record.window("a"):
            for _ in range(3):
                torch.empty(MIB, dtype=torch.uint8)
        with record.window("b"):
            more = torch.empty(4 * MIB, dtype=torch.uint8)
        del kept, more
    assert record.windows["a"].peak_bytes == 3 * MIB
    assert record.windows["b"].peak_bytes == 6 * MIB


def test_two_records_do_not_disturb_one_another():
    for _ in range(2):
        with record_allocations("cpu") as record, record.window("only"):
            torch.empty(MIB, dtype=torch.uint8)
        assert record.windows["only"].peak_bytes == MIB


def test_a_window_has_a_name_of_its_own():
    with record_allocations("cpu") as record:
        with record.window("a"):
            pass
        with pytest.raises(ValueError, match="already"), record.window("a"):
            pass


@pytest.mark.gpu
def test_cuda_counts_what_was_asked_for():
    with record_allocations("cuda") as record, record.window("only"):
        torch.empty(64 * MIB + 1, dtype=torch.uint8, device="cuda")
    assert record.windows["only"].peak_bytes == 64 * MIB + 1
