"""Every wrapper trains as one process on the full batch would; what it refuses; what it costs in collectives."""

import copy
import gc
import pickle
import tempfile
import threading
import time
import weakref
from functools import cache, partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from labkit.parallel.data_parallel import BucketedDDP, FlatDDP, NaiveDDP, OverlappedDDP, UnusedParameterError
from labkit.parallel.data_parallel.buckets import assign_to_buckets
from labkit.parallel.launch import Row, launch, run_ranks
from labkit.parallel.sync_batchnorm import SyncBatchNorm
from tests.cases import thinned
from tests.parallel.data_parallel_cases import (
    CASES,
    WRAPPERS,
    TiedInsideAndOutside,
    TwoHeads,
    built,
    frozen,
    plain,
    reference,
    run_on_ranks,
)


def _by_point(worker, points, world_size):
    """The only row of every rank, by point, or why there is none. One group has them all; a failure costs its own."""
    points = list(points)
    told = {point: [None] * world_size for point in points}
    for item in launch(worker, points, world_size=world_size, timeout_s=120):
        if isinstance(item, Row):
            told[points[item.index]][item.rank] = item.values
        elif item.status != "ok":
            told[points[item.index]] = item.reason
    return told


@cache
def _trained(world_size):
    return _by_point(run_on_ranks, WRAPPERS, world_size)


@cache
def _said():
    return _by_point(_answer, ON_TWO_RANKS, 2)


def _told(name):
    """What the function of `ON_TWO_RANKS` returned on each of two ranks."""
    told = _said()[name]
    assert isinstance(told, list), told
    return [of_rank["told"] for of_rank in told]


def _answer(name):
    yield {"told": ON_TWO_RANKS[name]()}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("world_size", thinned([2, 4], lambda world_size: world_size == 2))
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_five_steps_equal_one_process_on_the_full_batch(wrapper, world_size, case):
    trained = _trained(world_size)[wrapper]
    assert isinstance(trained, list), trained
    ranks = [found[case] for found in trained]
    for digests in zip(*(rank["digests"] for rank in ranks), strict=True):
        assert len(set(digests)) == 1, "parameters differ between ranks"
    expected, got = reference(case, world_size), ranks[0]["state"]
    assert got.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(got[name], values, 0, CASES[case].tolerance, equal_nan=False, err_msg=name)


def test_the_cases_can_fail():
    """Without synchronization, ranks differ and are far from the reference: the tolerances would see it."""
    state = {name: reference(name, 2) for name in CASES}
    alone = {name: reference(name, 1) for name in CASES}
    for name, case in CASES.items():
        worst = max(abs(a - b) for key in state[name] for a, b in zip(state[name][key], alone[name][key], strict=True))
        assert worst > 100 * case.tolerance, name


def _is_mean_over_ranks(model, loss_of):
    """Whether each gradient is the mean of what the bare module's would be on every rank."""
    averaged = [p.grad.clone() for p in model.module.parameters()]
    model.module.zero_grad()
    with model.no_sync():  # the hooks are still there
        model._synchronize_this_pass = False
        loss_of(model.module).backward()
    for p in model.module.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
    return [torch.allclose(got, p.grad, atol=1e-6) for got, p in zip(averaged, model.module.parameters(), strict=True)]


def _all_heads(model, inputs):
    return sum(model(inputs, head).sum() for head in range(3))


def _schedule_of_rank_0(parameters):
    if dist.get_rank():
        raise ValueError("expected a better schedule")
    return [list(parameters)]


def _refusals():
    told = {}

    def attempt(name, function):
        try:
            function()
            told[name] = None
        except (ValueError, UnusedParameterError) as error:
            told[name] = f"{type(error).__name__}: {error}"

    other = nn.Linear(3, 4 if dist.get_rank() else 5)
    more = nn.Sequential(*[nn.Linear(2, 2) for _ in range(1 + dist.get_rank())])
    attempt("shapes", lambda: BucketedDDP(other))
    attempt("number", lambda: NaiveDDP(more))
    attempt("nothing to train", lambda: FlatDDP(nn.ReLU()))
    attempt("bucket size", lambda: BucketedDDP(nn.Linear(2, 2), bucket_mb=0))
    attempt("schedule", lambda: BucketedDDP(nn.Linear(2, 2), schedule=lambda parameters: [["weight"]]))
    attempt("schedule on rank 1", lambda: BucketedDDP(nn.Linear(2, 2), schedule=_schedule_of_rank_0))
    for kind in (NaiveDDP, FlatDDP, OverlappedDDP, BucketedDDP):
        model = kind(TwoHeads())
        attempt(f"unused {kind.__name__}", lambda m=model: m(torch.ones(1, 6), 1).sum().backward())
        # the wrapper is usable afterwards
        model.zero_grad()
        inputs = torch.full((1, 6), 1.0 + dist.get_rank())
        sum(model(inputs, head).sum() for head in range(3)).backward()
        told[f"after {kind.__name__}"] = _is_mean_over_ranks(
            model, lambda m, x=inputs: sum(m(x, h).sum() for h in range(3))
        )
    sparse = OverlappedDDP(nn.Embedding(4, 2, sparse=True))
    attempt("sparse", lambda: sparse(torch.tensor([1])).sum().backward())
    return told


@pytest.fixture(scope="module")
def refusals():
    return _told("refusals")


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("shapes", "ValueError: expected the same model on every rank; they differ at weight: "),
        ("number", "ValueError: expected the same model on every rank, got 2 to 4 parameters and buffers"),
        ("nothing to train", "ValueError: expected a module with at least one parameter that requires a gradient"),
        ("bucket size", "ValueError: expected bucket sizes above 0 MB"),
        ("schedule", "ValueError: expected every parameter in one bucket, got 'bias' in 0"),
        ("schedule on rank 1", "ValueError: expected "),
        ("sparse", "ValueError: expected dense gradients, got a sparse one for weight"),
        *(
            (f"unused {kind}", "UnusedParameterError: the backward pass gave no gradient to heads.0.weight, ")
            for kind in ("NaiveDDP", "FlatDDP", "OverlappedDDP", "BucketedDDP")
        ),
    ],
)
def test_what_cannot_work_is_refused_on_every_rank(refusals, what, words):
    for told in refusals:
        assert told[what] is not None
        assert told[what].startswith(words)


@pytest.mark.parametrize("kind", ["NaiveDDP", "FlatDDP", "OverlappedDDP", "BucketedDDP"])
def test_a_wrapper_is_usable_after_a_refused_step(refusals, kind):
    assert all(all(told[f"after {kind}"]) for told in refusals)


def _contract(wrapper):
    """What a wrapper promises besides its numbers."""
    told, inputs = {}, torch.randn(3, 6, generator=torch.Generator().manual_seed(dist.get_rank()))
    model = WRAPPERS[wrapper](plain())
    model(inputs).sum().backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.finish_gradient_synchronization()
    model.finish_gradient_synchronization()
    told["idempotent"] = all(torch.equal(g, p.grad) for g, p in zip(gradients, model.parameters(), strict=True))
    model.zero_grad()
    with model.no_sync():
        loss = model(inputs).sum()
    loss.backward()  # as with torch's, the forward pass decides
    told["local"] = [float(p.grad.sum()) for p in model.parameters()]

    deferred = WRAPPERS[wrapper](plain(), finish_in_backward=False)
    deferred(inputs).sum().backward()
    deferred.finish_gradient_synchronization()
    told["deferred"] = _is_mean_over_ranks(deferred, lambda m: m(inputs).sum())
    deferred(inputs).sum().backward()
    try:
        deferred(inputs)
    except RuntimeError as error:
        told["forgotten"] = str(error)
    deferred.finish_gradient_synchronization()

    interrupted = WRAPPERS[wrapper](plain())
    hook = interrupted.module[0].weight.register_hook(_fail)  # the last layers have been heard of by then
    try:
        interrupted(inputs).sum().backward()
    except KeyError:
        hook.remove()
    interrupted.zero_grad()
    interrupted(inputs).sum().backward()
    told["after an exception"] = _is_mean_over_ranks(interrupted, lambda m: m(inputs).sum())

    hooked = WRAPPERS[wrapper](plain())
    for parameter in hooked.parameters():
        parameter.register_post_accumulate_grad_hook(_clip)
    hooked(inputs).sum().backward()
    told["hooks before it"] = _is_mean_over_ranks(hooked, lambda m: m(inputs).sum())

    before = hooked(inputs).sum()
    again = WRAPPERS[wrapper](hooked.module)
    told["superseded meanwhile"] = _message(before.backward)
    again.zero_grad()
    again(inputs).sum().backward()
    told["wrapped again"] = _is_mean_over_ranks(again, lambda m: m(inputs).sum())
    told["superseded"] = _refused(hooked, inputs)
    again.module[0].weight.register_post_accumulate_grad_hook(_take)
    told["taken away"] = _refused(again, inputs)

    told["with a graph"] = _refused(WRAPPERS[wrapper](plain()), inputs, create_graph=True)
    thawed = WRAPPERS[wrapper](frozen())
    thawed(inputs).sum().backward()
    thawed.requires_grad_()
    told["thawed"] = _refused(thawed, inputs)

    told["names"] = list(model.state_dict())
    alive = weakref.ref(model)
    del model
    gc.collect()
    told["freed"] = alive() is None
    return told


def _fail(gradient):
    raise KeyError("deliberate")


def _clip(parameter):
    parameter.grad.clamp_(-0.1, 0.1)


def _take(parameter):
    parameter.grad = None


def _refused(model, inputs, **options):
    """What a step says."""
    return _message(lambda: model(inputs).sum().backward(**options))


def _message(action):
    try:
        action()
    except (RuntimeError, ValueError) as error:
        return str(error)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_the_rest_of_the_contract(wrapper):
    first, second = _told(f"contract of {wrapper}")
    for told in (first, second):
        assert told["idempotent"]
        assert all(told["deferred"])
        assert told["forgotten"] == "call finish_gradient_synchronization() after each backward pass"
        assert all(told["after an exception"])
        assert all(told["hooks before it"])
        assert all(told["wrapped again"])
        assert "was wrapped again" in told["superseded meanwhile"]
        assert "was wrapped again" in told["superseded"]
        assert "took the gradient of 0.weight away" in told["taken away"]
        assert "without create_graph" in told["with a graph"]
        assert told["thawed"].startswith("2.weight is trained now")
        assert told["freed"]
        assert told["names"] == [f"module.{name}" for name in plain().state_dict()]
    assert first["local"] != second["local"]


def _missing_elsewhere():
    """Each rank leaves out another head: both say so, and none waits for the other."""
    model = BucketedDDP(TwoHeads(), bucket_mb=1e-4, first_bucket_mb=1e-4)
    try:
        model(torch.ones(1, 6), dist.get_rank()).sum().backward()
    except UnusedParameterError as error:
        return str(error)


def test_parameters_that_are_unused_on_one_rank_only_are_named_at_once():
    for rank, told in enumerate(_told("missing elsewhere")):
        assert f"heads.{1 - rank}.weight" in told


class _Conjugate(nn.Module):
    """Autograd gives the parameter's gradient as a conjugate that is not carried out."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor([1 + 2j, 3 - 1j]))

    def forward(self, x):
        return torch.view_as_real(self.factor.conj() * x)


def _complex():
    """Whether the gradient of a complex parameter is the mean over ranks."""
    found, x = {}, torch.tensor([1j, 2.0]) * (1 + dist.get_rank())
    for kind in (NaiveDDP, FlatDDP, OverlappedDDP, BucketedDDP):
        model = kind(_Conjugate())
        model(x).square().sum().backward()
        (own,) = torch.autograd.grad(model(x).square().sum(), [model.module.factor])
        dist.all_reduce(own := own.resolve_conj())
        found[kind.__name__] = torch.allclose(model.module.factor.grad, own / dist.get_world_size())
    return found


def test_gradients_of_complex_parameters_are_averaged():
    assert all(all(found.values()) for found in _told("complex"))


def _inputs_gradient():
    """Whether the gradient of an input, which autograd puts where the parameter's is, stays this rank's own."""
    found, rank = {}, dist.get_rank()
    for name, wrap in WRAPPERS.items():
        x = torch.full((6,), 1.0 + rank, requires_grad=True)
        model = wrap(_Added())
        model(x).square().sum().backward()
        found[name] = torch.equal(x.grad, 2 * x.detach())
    return found


class _Added(nn.Module):
    def __init__(self):
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(6))

    def forward(self, x):
        return x.view(2, 3) + self.offset.view(2, 3)


def test_the_gradient_of_an_input_stays_the_ranks_own():
    assert all(all(found.values()) for found in _told("inputs"))


def _evaluate_after_training():
    """Batch norm's running statistics differ by rank after a step; evaluation uses those of rank 0, as torch's does."""
    found = {}
    for name, kind in (("torch", DistributedDataParallel), ("labkit", BucketedDDP)):
        torch.manual_seed(0)
        model = kind(nn.BatchNorm1d(4))
        for step in range(3):
            inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
            model(inputs).square().sum().backward()
        model.eval()
        with torch.no_grad():
            found[name] = [float(model(torch.ones(1, 4)).sum()) for _ in range(2)]
    return found


def test_evaluation_after_training_uses_the_buffers_that_torchs_would():
    for told in _told("evaluation"):
        assert told["labkit"] == pytest.approx(told["torch"], abs=1e-6)


def _collectives(wrapper):
    """Names of the all-reduces of one backward pass, and whether each began before the last gradient was there."""
    calls, heard = [], []
    all_reduce = dist.all_reduce

    def counting(tensor, *args, **kwargs):
        calls.append((tensor.numel(), len(heard)))
        return all_reduce(tensor, *args, **kwargs)

    model = WRAPPERS[wrapper](plain())
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(heard.append)
    dist.all_reduce = counting
    try:
        model(torch.randn(3, 6)).sum().backward()
    finally:
        dist.all_reduce = all_reduce
    return calls


COLLECTIVES = {"naive": 6, "flat": 1, "overlapped": 6, "bucketed": 3, "one bucket": 1, "bucketed, no overlap": 3}


@pytest.mark.parametrize(("wrapper", "collectives"), COLLECTIVES.items())
def test_collectives_are_counted_and_begin_when_they_should(wrapper, collectives):
    calls = _told(f"collectives of {wrapper}")[0]
    elements = sum(p.numel() for p in plain().parameters())
    assert len(calls) == collectives
    assert sum(n for n, _ in calls) == elements
    begun_early = [heard < 6 for _, heard in calls]
    if wrapper in ("overlapped", "bucketed"):
        assert any(begun_early)
    else:
        assert not any(begun_early) or wrapper == "one bucket"  # which is full with the last gradient


def test_buckets_are_filled_in_order_by_bytes_and_dtype():
    mib = 2**20 // 4
    sizes = [mib // 2, mib // 2, 3 * mib, mib, mib, 8 * mib, mib // 4]
    parameters = [torch.empty(n, device="meta") for n in sizes]
    assert assign_to_buckets(parameters, 4, 1) == [[0, 1], [2, 3], [4, 5], [6]]
    assert assign_to_buckets(parameters, 1000, 1000) == [list(range(7))]
    assert assign_to_buckets(parameters, 0.001, 0.001) == [[index] for index in range(7)]
    mixed = [p.to(torch.bfloat16) if index % 2 else p for index, p in enumerate(parameters)]
    for bucket in assign_to_buckets(mixed, 4, 1):
        assert len({mixed[index].dtype for index in bucket}) == 1


def _shared():
    model = BucketedDDP(plain(), bucket_mb=3e-4)
    found = []
    for _ in range(2):
        model(torch.randn(3, 6)).sum().backward()
        storages = {bucket.buffer.untyped_storage().data_ptr() for bucket in model._buckets}
        found.append(all(p.grad.untyped_storage().data_ptr() in storages for p in model.parameters()))
        model.zero_grad(set_to_none=False)
    return found, model.bucket_bytes


def test_gradients_are_views_of_the_buckets():
    (found, sizes), _ = _told("views")
    assert found == [True, True]
    assert sum(sizes) == 4 * sum(p.numel() for p in plain().parameters())


def test_a_subgroup_averages_among_its_own():
    def train():
        group = dist.new_group([1, 2])
        if dist.get_rank() not in (1, 2):
            return None
        model = BucketedDDP(built(CASES["plain"], seed=dist.get_rank()), group=group)
        model(torch.full((1, 6), float(dist.get_rank()), dtype=torch.float64)).sum().backward()
        return [float(p.detach().sum()) for p in model.parameters()], [float(p.grad.sum()) for p in model.parameters()]

    found = run_ranks(train, world_size=3, timeout_s=60)
    assert found[1] == found[2]
    expected = [float(p.detach().sum()) for p in built(CASES["plain"], seed=1).parameters()]
    assert found[1][0] == expected


def test_buckets_in_a_thread_do_not_meet_the_messages_of_layers_that_synchronize_in_backward():
    """SyncBatchNorm exchanges sums in the middle of backward, while a thread averages buckets of the same group."""

    def train(all_reduce):
        torch.manual_seed(0)
        layers = [layer for _ in range(6) for layer in (nn.Linear(64, 64), SyncBatchNorm(64), nn.Tanh())]
        model = BucketedDDP(
            nn.Sequential(*layers).double(), bucket_mb=0.02, first_bucket_mb=0.02, all_reduce=all_reduce
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(8):
            torch.manual_seed(100 * step + dist.get_rank())
            optimizer.zero_grad()
            model(torch.randn(5, 64, dtype=torch.float64)).square().sum().backward()
            optimizer.step()
        return [p.detach().flatten()[:50].tolist() for p in model.parameters()]

    def train_each():
        return {all_reduce: train(all_reduce) for all_reduce in ("torch", "shared", "point_to_point")}

    ranks = run_ranks(train_each, world_size=3, timeout_s=120)
    assert ranks[0] == ranks[1] == ranks[2]
    for transport in ("shared", "point_to_point"):
        for got, wanted in zip(ranks[0][transport], ranks[0]["torch"], strict=True):
            assert got == pytest.approx(wanted, rel=1e-9, abs=1e-12)


def _impossible():
    told = []
    try:
        NaiveDDP(nn.Linear(2, 2), all_reduce="pigeon")
    except ValueError as error:
        told.append(str(error))
    try:
        NaiveDDP(nn.Linear(2, 2, dtype=torch.complex64), all_reduce="shared")
    except ValueError as error:
        told.append(str(error))
    model = BucketedDDP(nn.Linear(2, 2), all_reduce="shared")
    try:
        pickle.dumps(model)
    except TypeError as error:
        told.append(str(error))
    told.append(str((model.transports, copy.deepcopy(model)(torch.ones(1, 2)).shape)))
    model._average.channels[torch.device("cpu")].transport.run = None  # calling it is an error
    try:
        model(torch.ones(1, 2)).sum().backward()
    except TypeError as error:
        told.append(str(error))
    return told


def test_what_labkits_all_reduce_cannot_do_is_said_and_an_error_in_its_thread_reaches_the_caller():
    for told in _told("impossible"):
        assert "torch, auto, point_to_point, shared" in told[0]
        assert "got torch.complex64" in told[1]
        assert "save its `module`" in told[2]
        assert told[3] == "({'cpu': ('shared', '')}, torch.Size([1, 2]))"
        assert "not callable" in told[4]


def _threads():
    before = threading.active_count()
    model = BucketedDDP(nn.Linear(2, 2), all_reduce="shared")
    model(torch.ones(1, 2)).sum().backward()
    during = threading.active_count()
    del model
    gc.collect()
    end = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < end:
        time.sleep(0.01)
    return during - before, threading.active_count() - before


def test_a_wrapper_that_is_gone_leaves_no_thread_behind():
    assert _told("threads") == [[1, 0], [1, 0]]


def _copies():
    """Errors of the gradients of a copied, a saved and loaded wrapper; of the original after that; what is refused."""
    found, rank = {}, dist.get_rank()
    inputs = torch.randn(3, 6, generator=torch.Generator().manual_seed(rank))
    for name, wrap in WRAPPERS.items():
        model = wrap(plain())
        model(inputs).sum().backward()
        if rank == 0:
            copy.deepcopy(model)  # no collective: one rank may do it alone, to keep the best model, say
        wrappers = {"copied": copy.deepcopy(model), "original": model}
        path = f"{tempfile.mkdtemp()}/wrapper"
        try:
            torch.save(model, path)
            wrappers["loaded"] = torch.load(path, weights_only=False)
        except TypeError as error:
            found[f"{name}: saving"] = str(error)
        for which, each in wrappers.items():
            each.zero_grad()
            each(inputs).sum().backward()
            found[f"{name}: {which}"] = all(_is_mean_over_ranks(each, lambda m: m(inputs).sum()))
    group = dist.new_group([0, 1])
    of_group = copy.deepcopy(BucketedDDP(plain(), group=group))
    of_group(inputs).sum().backward()
    found["of a group: copied"] = all(_is_mean_over_ranks(of_group, lambda m: m(inputs).sum()))
    try:
        pickle.dumps(of_group)
    except TypeError as error:
        found["of a group: saving"] = str(error)
    return found


def test_a_copied_or_loaded_wrapper_averages_or_is_refused():
    for found in _told("copies"):
        for name in WRAPPERS:
            can_be_saved = "shared" not in name and "point" not in name
            which = ("copied", "original", "loaded") if can_be_saved else ("copied", "original")
            assert all(found[f"{name}: {each}"] for each in which), name
            assert can_be_saved or "save its `module`" in found[f"{name}: saving"]
        assert found["of a group: copied"]
        assert "save its `module`" in found["of a group: saving"]


def _differing():
    """What every rank says to models and arguments that only one of them has."""
    rank, told = dist.get_rank(), {}
    strided = nn.Conv2d(2, 3, 2)
    attempts = {
        "strides": lambda kind: kind(strided.to(memory_format=torch.channels_last) if rank else strided),
        "nothing to train": lambda kind: kind(nn.ReLU() if rank else nn.Linear(2, 2)),
        "frozen": lambda kind: kind(nn.Linear(2, 2).requires_grad_(rank == 0)),
        "arguments": lambda kind: kind(nn.Linear(2, 2), find_unused=rank == 0),
        "group": lambda kind: kind(nn.Linear(2, 2), group=alone) if rank else None,
        "bucket sizes": lambda kind: BucketedDDP(nn.Linear(2, 2), bucket_mb=float(rank)),
    }
    alone = dist.new_group([0])
    for kind in (NaiveDDP, FlatDDP, OverlappedDDP, BucketedDDP):
        for name, attempt in attempts.items():
            try:
                attempt(kind)
                told[f"{kind.__name__} {name}"] = None
            except ValueError as error:
                told[f"{kind.__name__} {name}"] = str(error)
    return told


def test_what_differs_between_ranks_is_refused_on_all_of_them():
    first, second = _told("differing")
    for name in first:
        if name.endswith(" group"):
            assert first[name] is None
            assert "a process group that this rank belongs to" in second[name]
        else:
            assert "expected the same model" in first[name]
            assert "expected the same model" in second[name]


def _two_threads(wrapper):
    """Hooks called by two threads, as for a model on two devices: collectives begun, and how many there should be."""
    model = WRAPPERS[wrapper](plain())
    starts, first, second = [], threading.Event(), threading.Event()

    def start(vector, op):
        starts.append(vector.data_ptr())
        if len(starts) == 1:
            first.set()
            second.wait(timeout=0.2)  # as long as it takes the other thread to come here, if it can
        else:
            second.set()
        return lambda: None

    def call_hooks(indices, begin):
        begin.wait()
        for index in indices:
            model._mark_ready(index, model._parameters_in_order[index])

    model._average.start = start
    model._begin_pass = lambda: None  # autograd's part, which no thread of ours is in
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    at_once = threading.Event()
    at_once.set()
    indices = range(len(model._parameters_in_order))
    begins_one = model._buckets[0].indices if wrapper == "bucketed" else (0,)
    others = [index for index in indices if index not in begins_one]
    threads = [
        threading.Thread(target=call_hooks, args=arguments) for arguments in ((begins_one, at_once), (others, first))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return starts, len(set(starts)), len(getattr(model, "_buckets", model._parameters_in_order))


@pytest.mark.parametrize("wrapper", ["bucketed", "overlapped"])
def test_hooks_in_two_threads_begin_each_collective_once(wrapper):
    for starts, different, wanted in _told(f"two threads of {wrapper}"):
        assert len(starts) == different == wanted


def _twice():
    told = {}
    for kind in (NaiveDDP, FlatDDP, OverlappedDDP, BucketedDDP):
        model = kind(TiedInsideAndOutside())
        x = torch.ones(1, 6, requires_grad=True)

        def loss(module, x=x):
            return sum(module(x, head=head)["found"][0].sum() for head in range(2))

        try:
            loss(model).backward()
            told[kind.__name__] = all(_is_mean_over_ranks(model, loss))
        except RuntimeError as error:
            told[kind.__name__] = str(error)
    return told


def test_a_gradient_that_comes_after_it_was_sent_is_an_error():
    for told in _told("twice"):
        assert told["NaiveDDP"] is told["FlatDDP"] is True
        for kind in ("OverlappedDDP", "BucketedDDP"):
            assert "pass find_unused=True" in told[kind]


ON_TWO_RANKS = {
    "threads": _threads,  # first: it counts those that are there
    "refusals": _refusals,
    "missing elsewhere": _missing_elsewhere,
    "complex": _complex,
    "inputs": _inputs_gradient,
    "evaluation": _evaluate_after_training,
    "views": _shared,
    "impossible": _impossible,
    "copies": _copies,
    "differing": _differing,
    "twice": _twice,
    **{f"contract of {wrapper}": partial(_contract, wrapper) for wrapper in WRAPPERS},
    **{f"collectives of {wrapper}": partial(_collectives, wrapper) for wrapper in COLLECTIVES},
    **{f"two threads of {wrapper}": partial(_two_threads, wrapper) for wrapper in ("bucketed", "overlapped")},
}
"""What one group of two ranks goes through, by name."""
