"""A user's alternatives, which are measured with those of a lab."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from labkit.lab.answers import Compare
from labkit.lab.config import LabConfig, ParameterError
from labkit.lab.declaration import Lab
from labkit.lab.user_worker import Plugins, run_counted, run_with_plugins


def check_plugins(study: Lab, plugins: Plugins) -> None:
    """ParameterError for what the lab has no place for, and for bad names and values."""
    alternatives = plugins.alternatives
    if not isinstance(alternatives, Mapping):
        raise ParameterError(
            f"{study.name}: expected alternatives by name, as {{'mine': mine}}, got"
            f" {alternatives!r:.80}"
        )
    if alternatives and study.plugin_parameter is None:
        names = ", ".join(map(str, alternatives))
        raise ParameterError(
            f"{study.name}: has no place for alternatives of your own, got {names}"
        )
    for name, alternative in alternatives.items():
        # Rows are named by values with commas between them, and told apart by these again.
        if not isinstance(name, str) or not name.isidentifier():
            raise ParameterError(
                f"{study.name}: expected names of letters, digits and _, got {name!r:.80}"
            )
        if not callable(alternative):
            raise ParameterError(
                f"{study.name}: alternative {name!r}: expected a function, got {alternative!r:.80}"
            )


def with_plugin_names(
    study: Lab, config: LabConfig, plugins: Plugins, *, only: bool = False
) -> LabConfig:
    """Add these names to the config's alternatives, or replace labkit's if `only`."""
    if only and not plugins.alternatives:
        raise ParameterError(f"{study.name}: only=True measures alternatives of yours: pass some")
    if study.plugin_parameter is None:
        return config
    labkits = getattr(config, study.plugin_parameter)
    if only:  # baselines stay, since ratios are to them
        baselines = {one.baseline for one in study.questions if isinstance(one, Compare)}
        labkits = [name for name in labkits if name in baselines]
    names = [*labkits, *plugins.alternatives]
    return config.model_copy(update={study.plugin_parameter: names})


def worker_with_plugins(study: Lab, plugins: Plugins) -> Callable[..., Any]:
    """Wrap the lab's worker so that it registers the plugins in the rank first."""
    if not plugins.alternatives:
        return study.worker
    # Calls are counted only for `lab.check`: to look at each operator would lengthen times.
    work = run_with_plugins if plugins.noted is None else run_counted
    return partial(work, study.register, plugins, study.worker)
