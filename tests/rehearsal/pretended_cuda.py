"""A CUDA device that is not here: main memory that says it is on the GPU.

Storages are tagged with where they are. Their tensors answer `cuda`, and an operator that would mix
devices raises as CUDA's would. Not seen: CUPTI, allocator counters, numerics, launches.
"""

import itertools
import time
import traceback
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

MEMORY = 79 * 2**30
PROPERTIES = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3", total_memory=MEMORY, major=9, minor=0, multi_processor_count=132
)
# CUDA lets a scalar of the CPU into element-wise operators, not into these.
NO_SCALARS = {"stack", "cat", "bmm", "mm", "matmul", "linear", "embedding", "conv2d"}
NO_SCALARS |= {"grad", "backward"}
# These cross from one device to another, or only look at a tensor.
CROSSING = {"copy_", "_foreach_copy_", "__getitem__", "__setitem__", "__set__"}
CROSSING |= {"_has_compatible_shallow_copy_type"}
OF_THE_SAME_STORAGE = {"grad", "data", "T"}
# By these the CPU waits for a GPU to have computed a value; `READ` lists what it has read.
READING = {"item", "tolist", "__bool__", "__int__", "__float__", "__index__", "nonzero"}
READ: list[str] = []


class MixedDevices(RuntimeError):
    """As CUDA would raise it."""


def is_on_gpu(tensor):
    # A backward pass is run by C++, which tags nothing: what has no tag there is a gradient.
    is_gradient = torch._C._current_graph_task_id() != -1
    with torch._C.DisableTorchFunction():
        # A fake tensor knows its own device.
        is_real = not isinstance(tensor, FakeTensor)
        return is_real and getattr(_storage(tensor), "is_on_gpu", is_gradient)


def _tag(result, is_there):
    with torch._C.DisableTorchFunction():
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, FakeTensor):
                _storage(tensor).is_on_gpu = is_there
    return result


def _storage(tensor):
    # A DTensor is where its rows of this rank are.
    return getattr(tensor, "_local_tensor", tensor).untyped_storage()


def _note_reading(name, args):
    is_selection = name == "__getitem__" and getattr(args[1], "dtype", None) is torch.bool
    if (name in READING or is_selection) and is_on_gpu(args[0]):
        READ.append(f"{name} in {traceback.extract_stack(limit=4)[0].name}")


class PretendedDevice(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(function, "__name__", str(function))
        _note_reading(name, args)
        if name == "__get__":
            return self._attribute(function, getattr(function.__self__, "__name__", ""), args)
        if name in ("to", "cpu", "cuda"):
            return self._moved(name, *args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if name == "_parse_to" or any(isinstance(tensor, FakeTensor) for tensor in tensors):
            return function(*args, **kwargs)
        if name in ("numpy", "__array__") and is_on_gpu(tensors[0]):
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        there = [is_on_gpu(tensor) for tensor in tensors]
        if kwargs.get("device") is not None:
            kind = torch.device(kwargs["device"]).type
            if kind == "meta":
                return function(*args, **kwargs)
            return _tag(function(*args, **kwargs | {"device": "cpu"}), kind == "cuda")
        self._check(name, tensors, there)
        result = function(*args, **kwargs)
        return _tag(result, any(there[:1] if name in CROSSING else there))

    def _attribute(self, function, attribute, args):
        tensor, *_ = args
        there = is_on_gpu(tensor)
        if attribute in ("is_cuda", "is_cpu"):
            return there == (attribute == "is_cuda")
        if attribute == "device" and there:
            return torch.device("cuda", 0)
        result = function(*args)
        return _tag(result, there) if attribute in OF_THE_SAME_STORAGE else result

    def _moved(self, name, tensor, *rest, copy=False, **options):
        """`Tensor.to`, `Tensor.cpu` and `Tensor.cuda`."""
        is_there = is_on_gpu(tensor)
        with torch._C.DisableTorchFunction():
            device = torch.device("cpu" if name == "to" else name)
            dtype = None
            if name == "to":
                device, dtype, *_ = torch._C._nn._parse_to(*rest, **options)
            target = is_there if device is None else device.type == "cuda"
            if rest and isinstance(rest[0], torch.Tensor):
                target = is_on_gpu(rest[0])
            result = tensor.to(dtype or tensor.dtype, copy=copy or target != is_there)
        return _tag(result, target)

    def _check(self, name, tensors, there):
        if name == "__getitem__" and there[:1] == [False] and any(there):
            raise MixedDevices("indices should be on the CPU, as the indexed tensor")
        if name in CROSSING:
            return
        with torch._C.DisableTorchFunction():
            scalar = [tensor.dim() == 0 and name not in NO_SCALARS for tensor in tensors]
        kinds = {at for at, free in zip(there, scalar, strict=True) if not free}
        gpu_scalar_among_cpu = kinds == {False} and any(there) and name != "fill_"
        if len(kinds) > 1 or gpu_scalar_among_cpu:
            raise MixedDevices(f"{name}: expected all tensors to be on the same device")


class _Event:
    def __init__(self, *, enable_timing):
        self.at = None

    def record(self, stream=None):
        self.at = time.perf_counter()

    def synchronize(self):
        pass

    def elapsed_time(self, other):
        return 1000 * (other.at - self.at)


class Stream:
    """Writes down, in `log`, what runs in which stream, and what waits for what."""

    log: list[str] = []
    used: list["Stream"] = []  # the last one is the current one

    def __init__(self, device=None, name="side"):
        self.name = name
        self.awaited = ""
        self.last = None  # what it has run since it waited

    def run(self, what):
        self.log.append(f"{self.name}{self.awaited}: {what}")
        self.awaited = ""
        self.last = what

    def wait_stream(self, other):
        self.awaited = f" after {other.name}"
        self.last = None

    def record_event(self):
        return self.last

    def wait_event(self, last):
        if last is not None:
            self.log.append(f"{self.name} waits for {last}")

    def reads(self, tensor):
        self.log.append(f"{self.name} reads {tuple(tensor.shape)}")


def current_stream(device=None):
    return Stream.used[-1] if Stream.used else Stream(name="compute")


@contextmanager
def _use_stream(stream):
    Stream.used.append(stream)
    yield
    Stream.used.pop()


_AUTOCAST = torch.autocast
_GENERATOR = torch.Generator
_RUN_BACKWARD = torch.autograd._engine_run_backward


class _Generator(_GENERATOR):  # a class, since annotations name it
    def __new__(cls, device="cpu"):
        return _GENERATOR()


def _run_backward(*args, **options):
    """Run a backward pass in which hooks and functions in Python see the pretended device, too."""
    with PretendedDevice():
        return _RUN_BACKWARD(*args, **options)


_COUNTED = itertools.count(2**20, 4096)  # allocator counters grow: no two moments are alike
_SILENT = "init set_device synchronize empty_cache reset_peak_memory_stats manual_seed"
# What `torch.cuda` answers. A function for each name: Dynamo refuses one that has two.
ANSWERS = {
    **{name: lambda *_: None for name in _SILENT.split()},
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "is_current_stream_capturing": lambda: False,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "get_device_properties": lambda device=0: PROPERTIES,
    "get_device_capability": lambda device=None: (PROPERTIES.major, PROPERTIES.minor),
    "get_device_name": lambda device=None: PROPERTIES.name,
    "get_arch_list": lambda: ["sm_90"],
    "mem_get_info": lambda device=None: (MEMORY - 2**30, MEMORY),
    "memory_stats": lambda device=None: {
        f"requested_bytes.all.{at}": next(_COUNTED) for at in ("current", "peak")
    },
    "get_rng_state": lambda device="cuda": torch.get_rng_state(),
    "set_rng_state": lambda state, device="cuda": torch.set_rng_state(state),
    "device_of": lambda tensor: nullcontext(),
    "Event": _Event,
    "Stream": Stream,
    "current_stream": current_stream,
    "stream": _use_stream,
}


@contextmanager
def pretended_gpu():
    """One H100 for whatever runs inside."""
    with (
        mock.patch.multiple(torch.cuda, **ANSWERS),
        mock.patch.object(torch, "autocast", lambda _, **options: _AUTOCAST("cpu", **options)),
        mock.patch.object(torch, "Generator", _Generator),
        mock.patch.object(torch.autograd, "_engine_run_backward", _run_backward),
        mock.patch.object(torch.Tensor, "record_stream", lambda x, stream: stream.reads(x)),
        PretendedDevice(),
    ):
        yield
