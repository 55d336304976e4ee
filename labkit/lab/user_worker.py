"""The worker of a rank with a user's alternatives. Every rank loads it: no heavy imports."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from labkit.lab.config import ParameterError
from labkit.lab.user_calls import counted_calls

# Returns the registry, from which the name is removed again. ValueError for a name that is taken.
Register = Callable[[str, Any], dict[str, Any]]


@dataclass(frozen=True)
class Plugins:
    """A user's alternatives for the lab's `register`, by name."""

    alternatives: Mapping[str, Any] = field(default_factory=dict)
    noted: tuple[str, ...] | None = None
    """Parts of names of operators to count, with all collectives; None: nothing is counted."""
    notes: Path | None = None
    """Folder in which ranks name the call that they are about to make (`user_calls`)."""


NO_PLUGINS = Plugins()


@contextmanager
def registered(register: Register, plugins: Plugins) -> Iterator[None]:
    """Register plugins in this process within the block. ParameterError for a taken name."""
    with ExitStack() as added:
        for name, alternative in plugins.alternatives.items():
            try:
                table = register(name, alternative)
            except ValueError as error:
                raise ParameterError(f"{name!r}: {error}") from None
            added.callback(table.pop, name, None)
        yield


def run_with_plugins(
    register: Register, plugins: Plugins, worker: Callable[..., Any], point: Any, **options: Any
) -> Iterator[Mapping[str, Any]]:
    """Yield the worker's rows, with the plugins registered in this rank."""
    with registered(register, plugins):
        yield from worker(point, **options) or ()


def run_counted(
    register: Register, plugins: Plugins, worker: Callable[..., Any], point: Any, **options: Any
) -> Iterator[Mapping[str, Any]]:
    """Yield the worker's rows, then one with the calls of the alternatives' code on this rank."""
    with counted_calls(plugins.noted or (), plugins.notes) as counter:
        wrapped = {
            name: counter.wrap(alternative) for name, alternative in plugins.alternatives.items()
        }
        yield from run_with_plugins(
            register, replace(plugins, alternatives=wrapped), worker, point, **options
        )
    yield counter.describe()
