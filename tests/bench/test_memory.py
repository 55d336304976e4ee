"""Memory against tensors of known size, and against PyTorch's own tracker."""

import threading
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from labkit.bench.ledger import AllocationLedger, peak_between, timeline_between
from labkit.bench.memory import (
    measure_second_peak,
    process_peak,
    record_allocations,
    saved_for_backward,
)
from labkit.costs.transformer import SIZES
from labkit.nn.training import TrainingStep

KIB = 2**10
MIB = 2**20


def _bytes(n):
    return torch.ones(n, dtype=torch.uint8)


def test_the_peak_of_a_window_counts_what_was_there_and_what_came():
    for _ in range(2):  # two records do not disturb one another
        with record_allocations("cpu") as record:
            kept = _bytes(2 * MIB)
            with record.window("a"):
                for _ in range(3):
                    _bytes(MIB)
            with record.window("b"):
                more = _bytes(4 * MIB)
            del kept, more
        assert [record.peaks[name] for name in "ab"] == [3 * MIB, 6 * MIB]
        assert record.left_bytes == 0


@pytest.mark.gpu
def test_cuda_counts_what_was_requested():
    with record_allocations("cuda") as record, record.window("only"):
        torch.empty(64 * MIB + 1, dtype=torch.uint8, device="cuda")
    assert record.peaks["only"] == 64 * MIB + 1


def test_a_record_with_releases_on_another_thread_is_repeated(monkeypatch):
    held = [_bytes(8 * MIB)]

    def run(mine):
        mine.append(_bytes(MIB))
        handed = [_bytes(4 * MIB)]
        if held:  # the first time only
            held.clear()
            thread = threading.Thread(target=handed.clear)
            thread.start()
            thread.join()

    assert measure_second_peak(list, run, device="cpu") == {"status": "ok", "peak_bytes": 6 * MIB}
    monkeypatch.setattr("labkit.bench.memory.max_over_ranks", lambda excess: 1.0)
    assert measure_second_peak(list, run, device="cpu")["status"] == "refused"


def test_a_record_about_like_the_one_before_is_the_last():
    made = []

    def make():
        made.append(1)
        return []

    def run(mine):
        handed = [_bytes(8 * MIB + 64 * len(made))]  # not to the byte, as in a real training
        thread = threading.Thread(target=handed.clear)
        thread.start()
        thread.join()

    assert measure_second_peak(make, run, device="cpu")["status"] == "refused"
    assert len(made) == 2


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads Linux's /proc")
def test_the_peak_of_the_process_counts_what_is_gone_and_no_earlier_peak():
    _bytes(128 * MIB)
    with process_peak() as memory:
        kept = _bytes(64 * MIB)
        _bytes(32 * MIB)
    assert 90 * MIB < memory.growth_bytes < 112 * MIB
    assert 60 * MIB < memory.end_bytes <= 80 * MIB
    del kept


def test_a_saved_storage_counts_once_and_whole():
    x = torch.randn(10, 10, requires_grad=True)
    result, saved = saved_for_backward(
        lambda: (x * x).sum() + (x.T @ x).sum() + x[:2].square().sum()
    )
    assert saved == {x.data_ptr(): 400}
    result.backward()
    assert x.grad is not None
    assert saved_for_backward(lambda: torch.randn(5).exp())[1] == {}


def _ledger():
    return AllocationLedger(source=lambda path: "test_memory.py" if path == __file__ else "")


def test_a_storage_is_in_the_ledger_once_from_its_birth_to_its_end():
    with _ledger() as ledger:
        a = _bytes(KIB)
        view = a.view(2, -1).add_(1)
        del a
        b = _bytes(2 * KIB)
        del view
        c = _bytes(KIB)
    assert [x.n_bytes for x in ledger.allocations] == [KIB, 2 * KIB, KIB]
    assert [(x.born, x.freed) for x in ledger.allocations] == [(0, 2), (1, None), (3, None)]
    assert all(
        x.line.startswith("test_memory.py:") and x.operator == "ones" for x in ledger.allocations
    )
    peak = peak_between(ledger.allocations, 0, ledger.moment)
    assert (peak.n_bytes, peak.moment, len(peak.live)) == (3 * KIB, 1, 2)
    assert peak_between(ledger.allocations, 3, 4).n_bytes == 3 * KIB
    del b, c


def test_categories_hold_for_the_whole_life_and_make_up_every_moment():
    with AllocationLedger() as ledger:
        kept = _bytes(KIB)
        with ledger.phase("work"):
            alive = kept + 1
            ledger.label_alive("made", "work")
        ledger.label("kept", [kept])
        del alive
    peak = peak_between(ledger.allocations, 0, ledger.moment)
    assert peak.by_category() == {"kept": KIB, "made": KIB}
    moments = timeline_between(ledger.allocations, 0, ledger.moment)
    assert max(sum(live.values()) for _, live in moments) == peak.n_bytes
    assert moments[-1][1] == {"kept": KIB, "made": 0}


def test_a_backward_operator_has_the_line_of_its_forward_operator():
    w = torch.ones(16, 16, requires_grad=True)
    with _ledger() as ledger:
        y = w @ torch.ones(16, 16)
        (y * y).sum().backward()
    lines = [x.line for x in ledger.allocations if x.operator == "mm"]
    assert (len(lines), len(set(lines))) == (2, 1)


def test_the_peak_of_a_fake_step_is_that_of_pytorchs_own_tracker():
    from torch.distributed._tools.mem_tracker import MemTracker  # which loads the compiler

    def build():
        step = TrainingStep(SIZES["nano"], batch=2, context_length=32)
        step.run()
        return step

    with FakeTensorMode():
        step = build()
        tracker = MemTracker()
        tracker.track_external(step.model, step.optimizer)
        with tracker:
            step.run()
        (theirs,) = tracker.get_tracker_snapshot("peak").values()
    with FakeTensorMode(), AllocationLedger() as ledger:
        step = build()
        start = ledger.moment
        step.run()
    assert (
        abs(peak_between(ledger.allocations, start, ledger.moment).n_bytes - theirs["Total"])
        < 4 * KIB
    )
