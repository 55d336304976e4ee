"""A Triton driver for a GPU that is not here: kernels are compiled for it for real, and launched nowhere."""

from types import SimpleNamespace

import torch
from triton.backends.compiler import GPUTarget

SHARED_BYTES = 227 * 1024
LOADED = (1, 1, 64, 0, 1024)  # module, function, registers, spills, most threads a block


class Driver:
    """The driver interface of Triton for an sm_90 with `SHARED_BYTES`; `launches` records every launch."""

    def __init__(self) -> None:
        self.launches: list[tuple[str, tuple[int, int, int]]] = []
        properties = {"max_shared_mem": SHARED_BYTES, "multiprocessor_count": 132, "warpSize": 32}
        self.utils = SimpleNamespace(
            load_binary=lambda name, kernel, shared, device: LOADED, get_device_properties=lambda device: properties
        )

    def launcher_cls(self, source, metadata):
        return lambda x, y, z, stream, function, *arguments: self.launches.append((metadata.name, (x, y, z)))

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self):
        """For the autotuner: calls a configuration once; all are equally fast."""

        def benchmark(call, quantiles):
            call()
            return [1.0, 1.0, 1.0]

        return benchmark
