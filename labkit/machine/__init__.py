"""This computer (`description`, `gpus`), limits on this process (`cgroups`), labkit's source, and other programs' load.

The description is imported on first use: ranks need the memory alone, and start without pydantic.
"""

from typing import TYPE_CHECKING, Any

from labkit.machine.cgroups import available_memory_bytes

if TYPE_CHECKING:
    from labkit.machine.description import Gpu, Machine, available_cores, describe_machine
    from labkit.machine.source import Source

__all__ = ["Gpu", "Machine", "Source", "available_cores", "available_memory_bytes", "describe_machine"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from labkit.machine import description

    return getattr(description, name)
