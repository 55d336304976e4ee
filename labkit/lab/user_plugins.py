"""A user's alternatives and models, which are measured with those of a lab."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn

from labkit.costs.transformer import SIZES, TransformerShape
from labkit.lab.answers import Compare
from labkit.lab.config import LabConfig, ParameterError
from labkit.lab.declaration import Lab
from labkit.lab.user_models import EXPECTED
from labkit.lab.user_worker import Plugins, run_counted, run_with_plugins
from labkit.nn.training import RESNET50


def check_plugins(study: Lab, plugins: Plugins) -> None:
    """ParameterError for what the lab has no place for, and for bad names and values."""
    for kind, plugged, has_place in (
        ("alternatives", plugins.alternatives, study.plugin_parameter is not None),
        ("models", plugins.models, study.takes_models),
    ):
        if not isinstance(plugged, Mapping):
            raise ParameterError(
                f"{study.name}: expected {kind} by name, as {{'mine': mine}}, got {plugged!r:.80}"
            )
        if plugged and not has_place:
            names = ", ".join(map(str, plugged))
            raise ParameterError(f"{study.name}: has no place for {kind} of your own, got {names}")
        for name in plugged:
            if not isinstance(name, str) or not name.isidentifier():
                raise ParameterError(
                    f"{study.name}: expected names of letters, digits and _, got {name!r:.80}"
                )
    for name, alternative in plugins.alternatives.items():
        if not callable(alternative):
            raise ParameterError(
                f"{study.name}: alternative {name!r}: expected a function, got {alternative!r:.80}"
            )
    _check_models(study, plugins.models)


def _check_models(study: Lab, models: Mapping[str, Any]) -> None:
    taken = (*SIZES, RESNET50)
    for name, model in models.items():
        if name in taken:
            raise ParameterError(
                f"{study.name}: model {name!r}: expected a name other than {', '.join(taken)}"
            )
        if not isinstance(model, TransformerShape) and (
            not callable(model) or isinstance(model, nn.Module)
        ):
            raise ParameterError(
                f"{study.name}: model {name!r}: expected {EXPECTED}, got {model!r:.80}"
            )


def with_plugin_names(
    study: Lab, config: LabConfig, plugins: Plugins, *, only: bool = False
) -> LabConfig:
    """Add these names to the config's lists of alternatives and of models.

    Empty lists of models stay empty. `only`: they replace labkit's; ParameterError if there are
    none then.
    """
    if only and not plugins.alternatives and not plugins.models:
        raise ParameterError(
            f"{study.name}: only=True measures alternatives or models of yours: pass some"
        )
    places = {place: plugins.models for place in study.model_parameters if getattr(config, place)}
    if study.plugin_parameter:
        places[study.plugin_parameter] = plugins.alternatives
    baselines = {question.baseline for question in study.questions if isinstance(question, Compare)}
    lists = {}
    for place, names in places.items():
        labkits = getattr(config, place)
        if only and names:  # but for those that they are compared with
            labkits = [name for name in labkits if name in baselines]
        lists[place] = [*labkits, *names]
    return config.model_copy(update=lists)


def worker_with_plugins(study: Lab, plugins: Plugins) -> Callable[..., Any]:
    """Wrap the lab's worker so that it registers the plugins in the rank first."""
    if not (plugins.alternatives or plugins.models):
        return study.worker
    work = run_with_plugins if plugins.noted is None else run_counted
    return partial(work, study.register, plugins, study.worker)
