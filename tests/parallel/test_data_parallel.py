"""Every wrapper trains as one process on the full batch would, in any situation, or refuses on all
ranks."""

import contextlib
import copy
import gc
import pickle
import threading
import weakref
from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
    fp16_compress_wrapper,
)
from torch.nn.parallel import DistributedDataParallel

from labkit.parallel.data_parallel import BucketedDDP, NaiveDDP
from labkit.parallel.data_parallel.buckets import assign_buckets
from labkit.parallel.sync_batchnorm import SyncBatchNorm
from tests.cases import thinned
from tests.parallel.data_parallel_cases import (
    CASES,
    WRAPPERS,
    Added,
    Conjugate,
    MaxNorm,
    TiedInsideAndOutside,
    TwoHeads,
    Undefined,
    built,
    digest_of,
    distance,
    frozen,
    plain,
    reference,
    state_of,
    train,
)
from tests.parallel.shared_ranks import on_ranks
from tests.parallel.waiting import wait_until

IN_SITUATIONS = ("naive", "flat", "overlapped", "bucketed", "bucketed, shared memory")


def _is_quick(world_size, wrapper, name):
    """On two ranks each case trains with one wrapper: they share most of their code."""
    place = [*CASES].index(name) % len(WRAPPERS)
    return world_size == 2 and place == [*WRAPPERS].index(wrapper)


TRAININGS = thinned(product((2, 4), WRAPPERS, CASES), _is_quick)


@on_ranks()
@pytest.mark.parametrize(("world_size", "wrapper", "name"), TRAININGS)
def test_training_equals_one_process_on_the_full_batch(world_size, wrapper, name):
    case = CASES[name]
    rank = dist.get_rank()
    model = WRAPPERS[wrapper](built(case, seed=rank), **case.options)
    digests = []
    train(case, model, [rank], None, lambda: digests.append(digest_of(model)))
    every = [None] * world_size
    dist.all_gather_object(every, digests)
    assert every == [digests] * world_size, "parameters differ between ranks"
    if rank == 0:
        assert distance(state_of(model), reference(case, world_size)) <= case.tolerance


def test_the_cases_can_fail():
    """Without synchronization, ranks differ and are far from the reference: the tolerances would
    see it."""
    for name, case in CASES.items():
        assert distance(reference(case, 2), reference(case, 1)) > 100 * case.tolerance, name


# Situations: each a function of a wrapper, which asserts that all is right, or raises what it is
# refused with.


def batch(rank=None, rows=3):
    rank = dist.get_rank() if rank is None else rank
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(rank))


def assert_averages(model, loss=lambda module: module(batch()).square().sum()):
    """A step gives every gradient as the mean over ranks of what the bare module's would be."""
    results = []
    for module in (model, model.module):
        model.zero_grad()
        loss(module).backward()
        if module is model:
            model.finish_gradient_synchronization()
        trained = [p for p in model.parameters() if p.requires_grad]
        results.append([torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in trained])
    model.zero_grad()
    for got, total in zip(*results, strict=True):
        dist.all_reduce(total.resolve_conj())
        assert torch.allclose(got, total / dist.get_world_size(), atol=1e-5)


def step(model):
    model(batch()).square().sum().backward()


def after(change, model_of=plain, **options):
    """A situation: a step, a change of the model, steps."""

    def situation(wrap):
        model = wrap(model_of(), **options)
        step(model)
        change(model)
        assert_averages(model)
        assert_averages(model)

    return situation


def _replace_gradients(model):
    for p in model.parameters():
        p.grad.data = p.grad.data * 0.5


def _detach_gradients(model):
    for p in model.parameters():
        p.grad.detach_()
        p.grad.zero_()


def _convolution():
    return nn.Sequential(nn.Unflatten(1, (3, 2, 1)), nn.Conv2d(3, 4, (2, 1)))


def _clip(p):
    p.grad.clamp_(-0.1, 0.1)


def _triple(p, *_):
    p.grad.mul_(3)


def _clip_by_hooks(model):
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(_clip)
        # which lives no longer than somebody has it
        p.node = torch.autograd.graph.get_gradient_edge(p).node
        p.node.register_hook(partial(_triple, p))


def _fail_in_backward(model):
    def fail(gradient):
        raise KeyError("deliberate")

    hook = model.module[0].weight.register_hook(fail)  # the last layers have been heard of by then
    with pytest.raises(KeyError):
        step(model)
    hook.remove()


def _freeze_for_a_step(model):
    weight = model.module[2].weight.requires_grad_(False)
    model.zero_grad()
    step(model)
    assert weight.grad is None
    assert_averages(model)
    weight.requires_grad_(True)


def _kept(wrap):
    model = wrap(plain())
    kept = []
    for factor in (1, 2, 3):
        model.zero_grad()
        (model(batch()).square().sum() * factor).backward()
        kept.append([p.grad.view(-1) if factor == 2 else p.grad for p in model.parameters()])
    for one, two, three in zip(*kept, strict=True):
        assert torch.allclose(2 * one.flatten(), two, atol=1e-4)
        assert torch.allclose(3 * one, three, atol=1e-4)


def _through_the_module(wrap):
    """Local, on one rank alone and on all, also between a forward pass and another backward
    pass."""
    model = wrap(plain())
    step(model)
    model.zero_grad()
    if dist.get_rank() == 0:
        step(model.module)
    model.zero_grad()
    step(model.module)
    sums = torch.stack([p.grad.sum() for p in model.parameters()])
    mean = sums.clone()
    dist.all_reduce(mean)
    assert not torch.allclose(sums, mean / 2)
    assert_averages(model)


def _no_sync(wrap):
    model = wrap(plain())
    with contextlib.suppress(KeyError), model.no_sync():
        loss = model(batch()).sum()
        raise KeyError
    loss.backward()  # as with torch's, the forward pass decides
    local = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model.module(batch()).sum().backward()
    for gradient, p in zip(local, model.parameters(), strict=True):
        assert torch.equal(gradient, p.grad)
    assert_averages(model)


def _deferred(wrap):
    model = wrap(plain(), finish_in_backward=False)
    assert_averages(model)
    step(model)
    model(batch())


def _idempotent(wrap):
    model = wrap(plain())
    step(model)
    gradients = [p.grad.clone() for p in model.parameters()]
    model.finish_gradient_synchronization()
    for gradient, p in zip(gradients, model.parameters(), strict=True):
        assert torch.equal(gradient, p.grad)


def _joined(divides_by_all):
    def situation(wrap):
        """Rank r has r + 1 batches: as one process that adds up what there is in each step."""
        torch.manual_seed(0)
        alone = plain()
        model = wrap(copy.deepcopy(alone))
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (alone, model)]
        world_size = dist.get_world_size()
        for number in range(world_size):
            optimizers[0].zero_grad()
            for rank in range(number, world_size):
                loss = alone(batch(10 * number + rank)).square().mean()
                (loss / (world_size if divides_by_all else world_size - number)).backward()
            optimizers[0].step()
        with model.join(divide_by_initial_world_size=divides_by_all):
            for number in range(dist.get_rank() + 1):
                optimizers[1].zero_grad()
                model(batch(10 * number + dist.get_rank())).square().mean().backward()
                optimizers[1].step()
        for expected, p in zip(alone.parameters(), model.parameters(), strict=True):
            assert torch.allclose(p, expected, atol=1e-6)
        assert_averages(model)

    return situation


def _joined_too_early(wrap):
    """A rank without batches may end the training on all ranks, which then go on with others."""
    model = wrap(nn.Linear(6, 6))

    def train():
        with model.join(throw_on_early_termination=True):
            for number in range(3 if dist.get_rank() == 0 else 2):
                model(batch(number)).square().mean().backward()

    with pytest.raises(RuntimeError, match="exhausted"):
        train()
    assert_averages(wrap(nn.Linear(6, 6)))


def _joined_with_own_buffers(wrap):
    """Where buffers are not broadcast, ranks keep theirs, and none waits for another's."""
    model = wrap(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)), broadcast_buffers=False)
    with model.join():
        for number in range(dist.get_rank() + 1):
            model(batch(10 * number + dist.get_rank())).square().mean().backward()
    assert int(model.module[1].num_batches_tracked) == dist.get_rank() + 1


def _joined_with_shared_buffers(wrap):
    """Which rank's buffers are broadcast is torch's choice."""
    states = []
    for kind in (DistributedDataParallel, wrap):
        torch.manual_seed(0)
        model = kind(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)))
        with model.join():
            for number in range(dist.get_rank() + 1):
                model(batch(10 * number + dist.get_rank())).square().mean().backward()
        states.append(list(model.module.state_dict().values()))
    for expected, value in zip(*states, strict=True):
        assert torch.allclose(value, expected)


def _two_passes_of_batch_norm(wrap):
    """Buffers that are broadcast and updated between two forward passes leave the first one's graph
    intact."""
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    model = wrap(copy.deepcopy(alone))
    for each in (alone, model):
        (
            each(batch(dist.get_rank())).square().mean()
            + each(batch(7 + dist.get_rank())).pow(3).mean()
        ).backward()
    for own, p in zip(alone.parameters(), model.parameters(), strict=True):
        dist.all_reduce(own.grad)
        torch.testing.assert_close(p.grad, own.grad / dist.get_world_size())


def _copied_module(wrap):
    model = wrap(plain())
    copied = copy.deepcopy(model.module)
    if dist.get_rank() == 0:
        step(copied)  # alone
    assert_averages(model)
    assert_averages(wrap(copied))


def _wrapped_again(wrap):
    model = wrap(plain())
    before = model(batch()).sum()
    again = wrap(model.module)
    with pytest.raises(RuntimeError, match="was wrapped again"):
        before.backward()
    assert_averages(again)
    model(batch())


def _inputs_gradient(wrap):
    """The gradient of an input, which autograd puts where the parameter's is, stays the rank's
    own."""
    model = wrap(Added())
    x = torch.full((6,), 1.0 + dist.get_rank(), requires_grad=True)
    model(x).square().sum().backward()
    assert torch.equal(x.grad, 2 * x.detach())


def _evaluated(wrap):
    """Batch norm's running statistics differ by rank after a step; evaluation uses those of rank 0,
    as torch's does."""
    results = []
    for kind in (DistributedDataParallel, wrap):
        model = kind(nn.BatchNorm1d(6))
        for _ in range(2):
            step(model)
        model.eval()
        with torch.inference_mode():
            results.append([float(model(torch.ones(1, 6)).sum()) for _ in range(2)])
    assert results[0] == pytest.approx(results[1], abs=1e-6)


def _freed(wrap):
    before = threading.active_count()
    model = wrap(plain())
    step(model)
    alive = weakref.ref(model)
    names = list(model.state_dict())
    del model
    gc.collect()
    assert wait_until(lambda: threading.active_count() <= before)
    assert alive() is None
    assert names == [f"module.{name}" for name in plain().state_dict()]


def _torchs_names(wrap):
    model = wrap(
        TwoHeads(), device_ids=None, process_group=dist.group.WORLD, find_unused_parameters=True
    )
    model(batch(), dist.get_rank()).sum().backward()
    assert model.module.heads[2].weight.grad is None
    assert model.module.heads[0].weight.grad is not None


def _add(model):
    model.module.append(nn.Linear(6, 6))


def _replace(model):
    model.module[0].bias = nn.Parameter(torch.zeros(16))


def _step_in_backward(model):
    p = model.module[0].weight
    p.register_post_accumulate_grad_hook(lambda p: torch.optim.SGD([p], lr=0.1).step())


def _optimizers_in_backward(model):
    from torch.distributed.optim import _apply_optimizer_in_backward  # seconds

    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})


def _take_gradients(model):
    model.module[0].weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))


def _return_from_hook(model):
    model.module[0].weight.register_post_accumulate_grad_hook(lambda p: p.grad)


def _use_as_two_threads_would(wrap):
    """Hooks called by two threads, as for a model on two devices: each collective begins once."""
    model = wrap(plain())
    starts = []
    first = threading.Event()
    second = threading.Event()

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
            model._hooks._hooks[index]((), (model._backward_order[index].grad,))

    model._all_reduce.start = start
    model._prepare_for_backward = lambda: None  # autograd's part, which no thread of ours is in
    model._is_armed = True
    model._versions = [p._version for p in model._backward_order]
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    first_ones = list(model._buckets[0].by_index)
    others = [index for index in range(len(model._backward_order)) if index not in first_ones]
    at_once = threading.Event()
    at_once.set()
    threads = [
        threading.Thread(target=call_hooks, args=each)
        for each in ((first_ones, at_once), (others, first))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(starts) == len(set(starts)) == len(model._buckets)


def _frozen_on_rank_0(wrap):
    model = wrap(plain(), group=dist.new_group())  # which is over afterwards
    model.module[2].weight.requires_grad_(dist.get_rank() == 1)
    step(model)
    if dist.get_rank():
        raise RuntimeError("it is frozen on the other rank, which says so")


def _in_float64(wrap):
    model = wrap(plain())
    model.double()
    model(batch().double()).sum().backward()


def _missing_elsewhere(wrap):
    """Each rank leaves out another head: both say so, and none waits for the other."""
    model = wrap(TwoHeads())
    model(batch(), dist.get_rank()).sum().backward()


def _with_a_graph(wrap):
    model = wrap(plain())
    model(batch()).sum().backward(create_graph=True)


def _after_unused(wrap):
    model = wrap(TwoHeads())
    with pytest.raises(RuntimeError, match="no gradient to heads"):
        model(batch(), 1).sum().backward()
    assert_averages(
        model, lambda module: sum(module(batch(), head).square().sum() for head in range(3))
    )


def _in_inference_mode():
    with torch.inference_mode():
        return plain()


def on_rank_1(one, other=plain):
    return one() if dist.get_rank() else other()


def _strided():
    return nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)


RIGHT = {
    "gradients replaced": after(_replace_gradients),
    "gradients detached": after(_detach_gradients),
    "to float16 and back": after(lambda model: model.module.half().float()),
    "to channels last": after(
        lambda model: model.module.to(memory_format=torch.channels_last), _convolution
    ),
    "parameters in new memory": after(
        lambda model: [setattr(p, "data", p.data.clone()) for p in model.parameters()]
    ),
    "hooks of the user's": after(_clip_by_hooks),
    "an exception": after(_fail_in_backward),
    "frozen for a step": after(_freeze_for_a_step),
    "a gradient undefined on one rank": lambda wrap: assert_averages(wrap(Undefined())),
    "kept gradients": _kept,
    "complex": lambda wrap: assert_averages(
        wrap(Conjugate()), lambda m: m(torch.tensor([1j, 2.0]))
    ),
    "through the module": _through_the_module,
    "no_sync": _no_sync,
    "idempotent": _idempotent,
    "join": _joined(True),
    "join, divided by those with a batch": _joined(False),
    "join, where no rank may end early": _joined_too_early,
    "join, with buffers of each rank": _joined_with_own_buffers,
    "join, with buffers of one rank": _joined_with_shared_buffers,
    "two forward passes, batch norm": _two_passes_of_batch_norm,
    "a copied module": _copied_module,
    "gradient of an input": _inputs_gradient,
    "evaluation": _evaluated,
    "freed": _freed,
    "torch's names": _torchs_names,
    "after an unused parameter": _after_unused,
}
REFUSED = {
    "shapes": ("rank 0 has weight=", lambda wrap: wrap(nn.Linear(3, 4 + dist.get_rank()))),
    "number": (
        "1.weight",
        lambda wrap: wrap(nn.Sequential(nn.Linear(2, 2), *on_rank_1(plain, list))),
    ),
    "strides": (
        "strides",
        lambda wrap: wrap(on_rank_1(_strided, lambda: nn.Conv2d(2, 3, 2))),
    ),
    "nothing to train": ("one parameter", lambda wrap: wrap(nn.ReLU())),
    "nothing to train on rank 1": ("one parameter", lambda wrap: wrap(on_rank_1(nn.ReLU))),
    "frozen on rank 1": ("not trained", lambda wrap: wrap(on_rank_1(frozen))),
    "arguments": ("find_unused", lambda wrap: wrap(plain(), find_unused=dist.get_rank() == 0)),
    "classes": (
        "expected the same",
        lambda wrap: on_rank_1(lambda: WRAPPERS["one bucket"], lambda: NaiveDDP)(plain()),
    ),
    "lazy on rank 1": (
        "lazy",
        lambda wrap: wrap(on_rank_1(lambda: nn.LazyLinear(2), lambda: nn.Linear(2, 2))),
    ),
    "meta": ("on meta", lambda wrap: wrap(nn.Linear(2, 2, device="meta"))),
    "inference mode": ("inference_mode", lambda wrap: wrap(_in_inference_mode())),
    "sparse": ("sparse", lambda wrap: wrap(nn.Embedding(4, 2, sparse=True))),
    "wrapped": ("without a wrapper", lambda wrap: wrap(nn.Sequential(wrap(plain())))),
    "device_ids": ("device_ids", lambda wrap: wrap(plain(), device_ids=[torch.device("meta")])),
    "copied": ("its `module`", lambda wrap: copy.deepcopy(wrap(plain()))),
    "pickled": ("its `module`", lambda wrap: pickle.dumps(wrap(plain()))),
    "wrapped again": ("was wrapped again", _wrapped_again),
    "added": ("5.weight was added", after(_add)),
    "replaced": ("0.bias was added, replaced", after(_replace)),
    "unfrozen": (
        "2.weight was added, replaced or unfrozen",
        after(lambda model: model.requires_grad_(), frozen),
    ),
    "max_norm of an embedding": (
        "0 has max_norm",
        lambda wrap: wrap(nn.Sequential(nn.Embedding(4, 2, max_norm=1.0))),
    ),
    "max_norm": ("in place", lambda wrap: assert_averages(wrap(MaxNorm()))),
    "updated in backward": ("updated in backward", after(_step_in_backward)),
    "optimizer in backward": ("updated in backward", after(_optimizers_in_backward)),
    "taken away": ("took the gradient of 0.weight away", after(_take_gradients)),
    "a hook that returns a value": ("should return None", after(_return_from_hook)),
    "with a graph": ("without create_graph", _with_a_graph),
    "unused": ("no gradient to heads", _missing_elsewhere),
    "not finished": ("call finish_gradient_synchronization", _deferred),
}
OF_ONE = {
    "twice": (
        "find_unused=True",
        "bucketed",
        lambda wrap: assert_averages(wrap(TiedInsideAndOutside()), _both_heads),
    ),
    "frozen on rank 0": ("frozen", "bucketed", _frozen_on_rank_0),
    "another dtype": ("has changed", "overlapped", _in_float64),
    "bucket size": ("above 0 MB", "one bucket", lambda wrap: wrap(plain(), bucket_mb=0)),
    "bucket sizes": (
        "expected the same",
        "one bucket",
        lambda wrap: wrap(plain(), bucket_mb=1 + dist.get_rank()),
    ),
    "a size on rank 1": (
        "above 0 MB",
        "one bucket",
        lambda wrap: wrap(plain(), bucket_mb=1 - dist.get_rank()),
    ),
    "no such all-reduce": (
        "all_reduce must be",
        "naive",
        lambda wrap: wrap(plain(), all_reduce="pigeon"),
    ),
    "complex over shared memory": (
        "complex64",
        "naive, shared memory",
        lambda wrap: wrap(Conjugate()),
    ),
    "an error in the thread": (
        "not callable",
        "bucketed, shared memory",
        lambda wrap: _break_transport(wrap(plain())),
    ),
    "group": ("that this rank belongs to", "naive", lambda wrap: _in_group_of_rank_0(wrap)),
    "gradients are views": (None, "one bucket", lambda wrap: _are_views(wrap(plain()))),
    "gradients are no views": (
        None,
        "bucketed",
        after(lambda model: None, gradient_as_bucket_view=False),
    ),
    "two threads": (None, "bucketed", _use_as_two_threads_would),
    "two threads, a parameter a bucket": (None, "overlapped", _use_as_two_threads_would),
    "compressed to bfloat16": (
        None,
        "bucketed",
        lambda wrap: _compressed(wrap(plain()), bf16_compress_hook),
    ),
    "compressed to float16": (
        None,
        "bucketed",
        lambda wrap: _compressed(wrap(plain()), fp16_compress_hook),
    ),
    "compressed by a hook around another": (
        None,
        "bucketed",
        lambda wrap: _compressed(wrap(plain()), fp16_compress_wrapper(allreduce_hook)),
    ),
}
"""Situations of one wrapper: what the refusal says, or None."""


def _both_heads(model):
    return sum(model(batch().requires_grad_(), head=head)["found"][0].sum() for head in range(2))


def _break_transport(model):
    model._all_reduce.channels[torch.device("cpu")].transport.run = None  # calling it is an error
    step(model)


def _in_group_of_rank_0(wrap):
    group = dist.new_group([0])
    if dist.get_rank() == 0:
        raise ValueError("that this rank belongs to")
    wrap(plain(), group=group)


def _are_views(model):
    """All gradients lie in one block of memory, the same in each step."""
    n_bytes = 4 * sum(p.numel() for p in model.parameters())
    blocks = set()
    for _ in range(2):
        step(model)
        storages = [p.grad.untyped_storage() for p in model.parameters()]
        blocks |= {(storage.data_ptr(), storage.nbytes()) for storage in storages}
        model.zero_grad()
    assert len(blocks) == 1
    assert blocks.pop()[1] == n_bytes


def _compressed(model, hook):
    averaged = []

    def asks_for_parameters(state, bucket):
        averaged.extend(bucket.parameters())
        return hook(state, bucket)

    model.register_comm_hook(None, asks_for_parameters)
    step(model)
    assert set(averaged) == set(model.parameters())
    rounded = [p.grad.clone() for p in model.parameters()]
    exact = BucketedDDP(model.module)
    exact.zero_grad()
    step(exact)
    pairs = list(zip(rounded, exact.parameters(), strict=True))
    assert all(torch.allclose(g, p.grad, atol=0.05, rtol=0.05) for g, p in pairs)
    assert not all(torch.equal(g, p.grad) for g, p in pairs)


def _situations_of(wrapper):
    """By name: what a situation is refused with, or None, the situation, and whether it is slow.

    Each is quick with one of the wrappers, in turns.
    """
    every = {name: (None, situation) for name, situation in RIGHT.items()} | REFUSED
    quick = [*every]
    if wrapper in IN_SITUATIONS:
        quick = quick[IN_SITUATIONS.index(wrapper) :: len(IN_SITUATIONS)]
    else:
        every = {"freed": every["freed"]}
    if "shared" in wrapper:
        every.pop("complex", None)  # labkit's all-reduce adds real numbers
    for name, (message, situation) in every.items():
        yield name, message, situation, name not in quick
    for name, (message, only, situation) in OF_ONE.items():
        if only == wrapper:
            yield name, message, situation, False


SITUATIONS = {
    (wrapper, name): (message, situation, is_slow)
    for wrapper in (*IN_SITUATIONS, "one bucket", "naive, shared memory")
    for name, message, situation, is_slow in _situations_of(wrapper)
}


# By name: a function as an argument takes all that this module holds to the ranks, for each test.
@on_ranks(2)
@pytest.mark.parametrize(
    ("wrapper", "name"),
    [
        pytest.param(*key, marks=pytest.mark.slow if is_slow else [])
        for key, (_, _, is_slow) in SITUATIONS.items()
    ],
)
def test_a_situation_is_averaged_right_or_refused_on_all_ranks(wrapper, name):
    message, situation, _ = SITUATIONS[wrapper, name]
    if message is None:
        situation(WRAPPERS[wrapper])
        return
    with pytest.raises(Exception, match=message) as refusal:
        situation(WRAPPERS[wrapper])
    assert "\n" not in str(refusal.value)


@on_ranks(2)
@pytest.mark.parametrize(
    ("wrapper", "expected"),
    {
        "naive": 6,
        "flat": 1,
        "overlapped": 6,
        "bucketed": 3,
        "one bucket": 1,
        "bucketed, no overlap": 3,
    }.items(),
)
def test_collectives_are_counted_and_begin_when_they_should(wrapper, expected):
    calls = []
    ready = []
    all_reduce = dist.all_reduce

    def counting(tensor, *args, **kwargs):
        calls.append((tensor.numel(), len(ready)))
        return all_reduce(tensor, *args, **kwargs)

    model = WRAPPERS[wrapper](plain())
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(ready.append)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(dist, "all_reduce", counting)
        step(model)
    assert len(calls) == expected
    assert sum(n for n, _ in calls) == sum(p.numel() for p in model.parameters())
    begin_early = any(n_ready < 6 for _, n_ready in calls)
    # One bucket is full with the last gradient.
    assert begin_early == (wrapper in ("overlapped", "bucketed"))


def test_buckets_are_filled_in_order_by_bytes_and_dtype():
    mib = 2**20 // 4
    sizes = [mib // 2, mib // 2, 3 * mib, mib, mib, 8 * mib, mib // 4]
    parameters = [torch.empty(n, device="meta") for n in sizes]
    assert assign_buckets(parameters, 4, 1) == [[0, 1], [2, 3], [4, 5], [6]]
    assert assign_buckets(parameters, 1000, 1000) == [list(range(7))]
    assert assign_buckets(parameters, 0.001, 0.001) == [[index] for index in range(7)]
    mixed = [p.to(torch.bfloat16) if index % 2 else p for index, p in enumerate(parameters)]
    for bucket in assign_buckets(mixed, 4, 1):
        assert len({mixed[index].dtype for index in bucket}) == 1


@on_ranks(3)
@pytest.mark.parametrize("all_reduce", ["shared", "point_to_point"])
def test_buckets_in_a_thread_do_not_meet_the_messages_of_layers_that_synchronize_in_backward(
    all_reduce,
):
    """SyncBatchNorm exchanges sums in the middle of backward, while a thread averages buckets of
    the same group."""

    def train(all_reduce):
        torch.manual_seed(0)
        layers = [
            layer for _ in range(6) for layer in (nn.Linear(64, 64), SyncBatchNorm(64), nn.Tanh())
        ]
        model = BucketedDDP(
            nn.Sequential(*layers).double(), bucket_cap_mb=0.02, all_reduce=all_reduce
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(4):
            torch.manual_seed(100 * number + dist.get_rank())
            optimizer.zero_grad()
            model(torch.randn(5, 64, dtype=torch.float64)).square().sum().backward()
            optimizer.step()
        return [p.detach() for p in model.parameters()]

    trained = train(all_reduce)
    for got, expected in zip(trained, train("torch"), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)
    checksums = [None] * dist.get_world_size()
    dist.all_gather_object(checksums, [float(p.sum()) for p in trained])
    assert checksums == [checksums[0]] * len(checksums), "parameters differ between ranks"
