"""Whether this machine has the device and the memory that a point needs."""

from typing import TYPE_CHECKING

from labkit.lab.units import format_bytes
from labkit.machine import available_memory_bytes

if TYPE_CHECKING:
    from labkit.machine import Machine


def skip_reason(
    machine: "Machine", device: str, needed_bytes: float, *, ranks: int = 1, says: str = "needs {}"
) -> str | None:
    """Why `ranks` ranks cannot have `needed_bytes` together here ("needs 51 GiB, 22 GiB available"), or None.

    On "cuda" each rank has a GPU, as far as there are some, and the smallest of these decides. `says` words the
    bytes needed.
    """
    if reason := machine.no_device_reason(device):
        return reason
    gpus = [gpu.available_bytes for gpu in machine.gpus[:ranks]]
    available = len(gpus) * min(gpus) if device == "cuda" else available_memory_bytes()
    if needed_bytes <= available:
        return None
    return f"{says.format(format_bytes(needed_bytes))}, {format_bytes(available)} available"
