"""What this computer is (`description`), how much memory it has left (`memory_limits`), which labkit runs
(`source`), and what else is going on (`load`).

The description is imported when it is asked for: ranks ask for memory alone, and start without pydantic.
"""

from typing import TYPE_CHECKING, Any

from labkit.machine.memory_limits import available_memory_bytes

if TYPE_CHECKING:
    from labkit.machine.description import Gpu, Machine, available_cores, describe_machine
    from labkit.machine.source import Source

__all__ = ["Gpu", "Machine", "Source", "available_cores", "available_memory_bytes", "describe_machine"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from labkit.machine import description

    return getattr(description, name)
