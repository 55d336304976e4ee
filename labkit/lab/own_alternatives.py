"""A reader's own alternatives: checked, carried to the ranks, and measured beside labkit's as one of them."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from labkit.lab.config import LabConfig, ParameterError
from labkit.lab.study import Study

PlugIn = Callable[[str, Any], None]


def with_alternatives(study: Study, config: LabConfig, alternatives: Mapping[str, Any]) -> LabConfig:
    """The config that also names these, once they are known in this process.

    ParameterError if the lab compares nothing of the kind, if a name is taken, or for what cannot be called.
    """
    if not alternatives:
        return config
    if study.plugs_into is None:
        raise ParameterError(f"{study.name}: has no place for alternatives of your own, got {', '.join(alternatives)}")
    for name, alternative in alternatives.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise ParameterError(f"{study.name}: expected names of letters, digits and _, got {name!r:.80}")
        if not callable(alternative):
            raise ParameterError(f"{study.name}: alternative {name!r}: expected a function, got {alternative!r:.80}")
        try:
            study.plug_in(name, alternative)
        except ValueError as error:
            raise ParameterError(f"{study.name}: alternative {name!r}: {error}") from None
    known = getattr(config, study.plugs_into)
    return config.model_copy(update={study.plugs_into: [*known, *(name for name in alternatives if name not in known)]})


def worker_with(study: Study, alternatives: Mapping[str, Any]) -> Callable[..., Any]:
    """The study's worker; in a rank, it plugs the alternatives in first."""
    worker: Callable[..., Any] = type(study).worker
    return partial(_plug_in_and_work, type(study).plug_in, dict(alternatives), worker) if alternatives else worker


def _plug_in_and_work(
    plug_in: PlugIn, alternatives: Mapping[str, Any], worker: Callable[..., Any], point: Any, **options: Any
) -> Iterable[Mapping[str, Any]] | None:
    for name, alternative in alternatives.items():
        plug_in(name, alternative)
    rows: Iterable[Mapping[str, Any]] | None = worker(point, **options)
    return rows
