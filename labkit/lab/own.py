"""What a reader puts beside what a lab compares: checked, carried to the ranks, and measured as one of them."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn

from labkit.costs.transformer import SIZES, TransformerShape
from labkit.lab.config import LabConfig, ParameterError
from labkit.lab.declaration import Lab
from labkit.lab.own_models import EXPECTED, MODEL_FIELDS, facts_of, known_models, told_where
from labkit.nn.workloads import RESNET50
from labkit.parallel.ranks.torchrun import is_job_rank

PlugIn = Callable[[str, Any], dict[str, Any]]


@dataclass(frozen=True)
class Own:
    """A reader's own, by name: alternatives as the lab's `register` takes them, models as `lab.own_models` has them."""

    alternatives: Mapping[str, Any] = field(default_factory=dict)
    models: Mapping[str, Any] = field(default_factory=dict)


@contextmanager
def known(register: PlugIn, own: Own) -> Iterator[None]:
    """Within, these are known in this process, and afterwards no longer. ParameterError for a name that is taken."""
    with ExitStack() as added:
        for name, alternative in own.alternatives.items():
            try:
                table = register(name, alternative)
            except ValueError as error:
                raise ParameterError(f"{name!r}: {error}") from None
            added.callback(table.pop, name, None)
        added.enter_context(known_models(own.models))
        yield


def check_own(study: Lab, own: Own) -> None:
    """ParameterError if the lab compares nothing of the kind, for a name that can't be, and for what is neither."""
    for kind, given, has_place in (
        ("alternatives", own.alternatives, study.plugin_parameter),
        ("models", own.models, study.model_parameters),
    ):
        if not isinstance(given, Mapping):
            raise ParameterError(f"{study.name}: expected {kind} by name, as {{'mine': mine}}, got {given!r:.80}")
        if given and not has_place:
            raise ParameterError(f"{study.name}: has no place for {kind} of your own, got {', '.join(map(str, given))}")
        for name in given:
            if not isinstance(name, str) or not name.isidentifier():
                raise ParameterError(f"{study.name}: expected names of letters, digits and _, got {name!r:.80}")
    for name, alternative in own.alternatives.items():
        if not callable(alternative):
            raise ParameterError(f"{study.name}: alternative {name!r}: expected a function, got {alternative!r:.80}")
    for name, model in own.models.items():
        if name in (taken := (*SIZES, RESNET50)):
            raise ParameterError(f"{study.name}: model {name!r}: expected a name other than {', '.join(taken)}")
        if not isinstance(model, TransformerShape) and (not callable(model) or isinstance(model, nn.Module)):
            raise ParameterError(f"{study.name}: model {name!r}: expected {EXPECTED}, got {model!r:.80}")


def with_names(study: Lab, config: LabConfig, own: Own) -> LabConfig:
    """The config that also names these wherever it says what is compared; of models, lists that are empty stay so."""
    places = {study.plugin_parameter: own.alternatives} if study.plugin_parameter else {}
    places |= {place: own.models for place in study.model_parameters if getattr(config, place)}
    return config.model_copy(update={place: [*getattr(config, place), *given] for place, given in places.items()})


def worker_with(study: Lab, own: Own) -> Callable[..., Any]:
    """The study's worker; in a rank, it makes the reader's own known first."""
    worker: Callable[..., Any] = study.worker
    if not own.alternatives and not own.models:
        return worker
    return partial(_work, study.register, own, worker)


def _work(
    register: PlugIn, own: Own, worker: Callable[..., Any], point: Any, **options: Any
) -> Iterator[Mapping[str, Any]]:
    # a rank that torchrun has started is inside `measure`, which has made them known for all points
    with nullcontext() if is_job_rank() else known(register, own):
        names = [getattr(point, field, None) for field in MODEL_FIELDS]
        model = next((name for name in names if name in own.models), None)
        facts = facts_of(model) if model else {}
        with told_where(model):
            for row in worker(point, **options) or ():
                yield facts | row
