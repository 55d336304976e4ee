"""The ledger against tensors of known size, and against PyTorch's own tracker."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from labkit.bench.ledger import AllocationLedger, peak_between, timeline_between
from labkit.nn.training import TrainingStep
from labkit.nn.transformer import shape_named

KIB = 2**10


def test_a_storage_counts_once_from_its_birth_to_its_end():
    with AllocationLedger(source=lambda path: "test_ledger.py" if path == __file__ else "") as ledger:
        a = torch.empty(KIB, dtype=torch.uint8)
        view = a.view(2, -1)
        del a
        b = torch.empty(2 * KIB, dtype=torch.uint8)
        del view
        c = torch.empty(KIB, dtype=torch.uint8)
    assert [x.n_bytes for x in ledger.allocations] == [KIB, 2 * KIB, KIB]
    assert [(x.born, x.freed) for x in ledger.allocations] == [(0, 2), (1, None), (3, None)]
    assert all(x.line.startswith("test_ledger.py:") and x.operator == "empty" for x in ledger.allocations)
    peak = peak_between(ledger.allocations, 0, ledger.moment)
    assert (peak.n_bytes, peak.moment, len(peak.live)) == (3 * KIB, 1, 2)
    assert peak_between(ledger.allocations, 3, 4).n_bytes == 3 * KIB
    del b, c


def test_an_operator_in_place_makes_nothing():
    with AllocationLedger() as ledger:
        torch.zeros(KIB).add_(1).mul_(2)
    assert len(ledger.allocations) == 1


def test_categories_hold_for_the_whole_life_and_make_up_every_moment():
    with AllocationLedger() as ledger:
        kept = torch.empty(KIB, dtype=torch.uint8)
        with ledger.phase("work"):
            alive = kept + 1
            ledger.label_alive("made", "work")
        ledger.label("kept", [kept])
        del alive
        ledger.label_rest(lambda allocation: "rest")
    peak = peak_between(ledger.allocations, 0, ledger.moment)
    assert peak.by_category() == {"kept": KIB, "made": KIB}
    moments = timeline_between(ledger.allocations, 0, ledger.moment)
    assert max(sum(live.values()) for _, live in moments) == peak.n_bytes
    assert moments[-1][1] == {"kept": KIB, "made": 0}


def test_a_backward_operator_has_the_line_of_its_forward_operator():
    w = torch.ones(16, 16, requires_grad=True)
    with AllocationLedger(source=lambda path: "test_ledger.py" if path == __file__ else "") as ledger:
        y = w @ torch.ones(16, 16)
        (y * y).sum().backward()
    products = [x.line for x in ledger.allocations if x.operator == "mm"]
    assert len(products) == 2
    assert products[0] == products[1]


def test_fake_tensors_are_counted_and_take_no_memory():
    with FakeTensorMode(), AllocationLedger() as ledger:
        torch.empty(2**44, dtype=torch.uint8)
    assert peak_between(ledger.allocations, 0, ledger.moment).n_bytes == 2**44


def test_the_peak_of_a_step_is_that_of_pytorchs_own_tracker():
    from torch.distributed._tools.mem_tracker import MemTracker  # which loads the compiler

    def build():
        step = TrainingStep(shape_named("nano"), batch=2, context_length=32)
        step.run()
        return step

    with FakeTensorMode():
        step = build()
        tracker = MemTracker()
        tracker.track_external(step.model, step.optimizer, step.inputs, step.targets)
        with tracker:
            step.run()
        (theirs,) = tracker.get_tracker_snapshot("peak").values()
    with FakeTensorMode(), AllocationLedger() as ledger:
        step = build()
        start = ledger.moment
        step.run()
    assert abs(peak_between(ledger.allocations, start, ledger.moment).n_bytes - theirs["Total"]) < 4 * KIB
