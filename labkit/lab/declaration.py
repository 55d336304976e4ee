"""A lab on one page: `LAB = Lab(...)` in `labkit/studies/<lab>/lab.py` declares all of it.

To add a lab: that file, its `worker.py`, a notebook `notebooks/<number>_<lab>.ipynb`, and its name
in `labkit/studies/__init__.py`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from importlib import import_module
from typing import Any

from labkit.lab.answers import Compare, Question
from labkit.lab.config import (
    AUTO,
    LabConfig,
    ParameterError,
    nearest,
    ranks_on_gpus,
    resolve_config,
    shorten,
)
from labkit.lab.facts import Answer
from labkit.lab.metric import Results
from labkit.lab.point import Point
from labkit.lab.user_worker import Plugins, Register, run_counted, run_with_plugins
from labkit.machine.description import Machine, describe_machine

# Shows a few words of progress, while nothing is measured yet.
Say = Callable[[str], None]

# Profile `paper`. Without `gain` all rounds are timed, however soon a difference would show.
PAPER = {"gain": 0.0, "rounds_s": 30.0, "timeout_s": 3600.0}

# Of these a student's algorithm may consist: an all-reduce in a single call would be none.
MESSAGES = ("send", "receive", "exchange")
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "gather")

# As a student types them; several functions may make calls of one kind.
FUNCTIONS = {kind: f"`dist.{kind}`" for kind in COLLECTIVES} | {
    "send": "`dist.send`, `dist.isend`",
    "receive": "`dist.recv`, `dist.irecv`, `dist.batch_isend_irecv`",
    "exchange": "`labkit.parallel.exchange.exchange`",
}


@dataclass(frozen=True, kw_only=True)
class Task:
    """A function or class that a student writes instead of one of the lab's alternatives."""

    name: str
    text: str
    """What it must do, in Markdown."""
    stub: str
    """Code to complete: its signature, a docstring, and NotImplementedError."""
    allowed: tuple[str, ...] = ()
    """Kinds of calls that its code may make; all others are refused."""
    at_most: int | None = None
    """Collectives per forward and backward pass together; None: as many as it likes."""
    moves_input: bool = False
    """Each rank's messages carry at least the bytes of its input: with fewer, something else that
    is not counted, such as another thread, does the work."""
    noted: tuple[str, ...] = ()
    """Parts of names of torch's operators that do the work: no mistake, but a teacher is told."""

    @property
    def may_call(self) -> str:
        """What the code may call, in Markdown."""
        if not self.allowed:
            return "operators of torch, but no fused attention; no communication."
        text = "to communicate, only " + ", ".join(FUNCTIONS[kind] for kind in self.allowed)
        if self.at_most is not None:
            text += f"; at most {self.at_most} per forward and backward pass together"
        return f"{text}. Neither labkit's algorithms nor torch's own wrappers."


@dataclass(frozen=True, kw_only=True)
class Lab:
    """A lab: points to measure, the worker that measures them, and questions to answer."""

    name: str
    """Name of its package, its notebook and its page."""
    title: str
    summary: str
    """One line for `labkit list` and the index."""
    config: type[LabConfig]
    """Parameters; the defaults are the profile `quick`."""
    points: Callable[[Any, Machine], Iterable[Point]]
    """Plans the points; neighbors may share their ranks. ParameterError for bad inputs."""
    worker: Callable[..., Iterable[Mapping[str, Any]] | None]
    """Runs on every rank for each point and yields rows; its module imports nothing heavy."""
    questions: Sequence[Question]
    is_checked: Callable[[Any], bool] = lambda point: True
    """Whether a point belongs to a check of results. Others time what these have checked."""
    alternatives: tuple[str, ...] = ()
    """Columns that name what a row checks or times; a row has one of them."""
    names: Mapping[Any, str] = field(default_factory=dict)
    """Names of alternatives in sentences, if they differ from the values of their column."""
    paper: Mapping[str, Any] = field(default_factory=dict)
    """Parameters of the published measurements."""
    smoke: Mapping[str, Any] = field(default_factory=dict)
    """Parameters of `smoke` if the shortened ones of `quick` would still take long."""
    on_gpu: Mapping[str, Any] = field(default_factory=dict)
    """Parameters of `quick` on GPUs, where a CPU's sizes would only measure kernel launches.

    Numbers of ranks end with the number of GPUs; with one GPU the lab's defaults stay.
    """
    plugin_parameter: str | None = None
    """Parameter that names the alternatives, if a user may add to them."""
    task: Task | None = None
    """What a class writes in the place of an alternative."""
    register: Register = lambda name, alternative: {}
    verify: Callable[[Any], Callable[[], tuple[bool, str]] | None] | None = None
    """Returns what a rank calls to compare a user's alternative with one process.

    It returns whether the alternative is right, and what is off. None: it is measured instead.
    """
    model_parameters: tuple[str, ...] = ()
    """Parameters that name models; the profile `smoke` takes the smallest model in each."""
    preload: tuple[str, ...] = ()
    """Modules that take long to import: the fork server does it once for all groups of ranks."""
    example: Callable[[Results], str | None] = lambda results: None
    """Names the example that was measured; None if the answers are about the reader's machine."""
    keeps_checkpoints: bool = False
    """Whether the worker goes on with an interrupted point.

    It then gets `checkpoints=`, a directory with one folder `<point.id>/` per point; None on ranks
    that must not write.
    """
    prepare: Callable[[Any, Say], str | None] = lambda config, say: None
    """Fetches the inputs of all points; returns None, or why nothing can be measured here."""

    @cached_property
    def profiles(self) -> dict[str, LabConfig]:
        """Parameters by profile; `smoke` is a shortened `quick`."""
        quick = self.config()
        smoke = shorten(quick, self.model_parameters).model_copy(update=dict(self.smoke))
        # A lab that times nothing has no rounds.
        shared = {name: value for name, value in PAPER.items() if hasattr(quick, name)}
        return {"smoke": smoke, "quick": quick, "paper": self.config(**{**shared, **self.paper})}

    @property
    def comparisons(self) -> list[Compare]:
        """Questions that compare alternatives."""
        return [question for question in self.questions if isinstance(question, Compare)]

    def profiles_on(self, machine: Machine, device: Any = AUTO) -> dict[str, LabConfig]:
        """Return parameters by profile on a device of that machine, "cpu", "cuda" or "auto"."""
        n_gpus = len(machine.gpus)
        # A lab that has no parameter `device` uses GPUs for NCCL alone, between two or more.
        needed = 1 if "device" in self.config.model_fields else 2
        if n_gpus < needed or machine.device(device) != "cuda":
            return self.profiles
        return self.profiles | {"quick": self.config(**ranks_on_gpus(self.on_gpu, n_gpus))}

    def configure(
        self, profile: str, overrides: Mapping[str, Any], machine: Machine | None = None
    ) -> LabConfig:
        """Return a profile's parameters on a machine, or here. ParameterError for wrong ones."""
        profiles = self.profiles_on(machine or describe_machine(), overrides.get("device") or AUTO)
        return resolve_config(self.name, profiles, profile, overrides)

    def plan(self, config: LabConfig, machine: Machine) -> list[Point]:
        """Return points in order; a point that is planned twice is measured once."""
        return list({point.id: point for point in self.points(config, machine)}.values())

    def only_checks(self) -> "Lab":
        """Return this lab with nothing but the points that check results."""

        def points(config: Any, machine: Machine) -> Iterable[Point]:
            return filter(self.is_checked, self.points(config, machine))

        return replace(self, points=points)

    def check_plugins(self, plugins: Plugins) -> None:
        """ParameterError for what the lab has no place for, and for bad names and values."""
        alternatives = plugins.alternatives
        if not isinstance(alternatives, Mapping):
            raise ParameterError(
                f"{self.name}: expected alternatives by name, as {{'mine': mine}}, got"
                f" {alternatives!r:.80}"
            )
        if alternatives and self.plugin_parameter is None:
            names = ", ".join(map(str, alternatives))
            raise ParameterError(
                f"{self.name}: has no place for alternatives of your own, got {names}"
            )
        for name, alternative in alternatives.items():
            # Rows are named by values with commas between them, and told apart by these again.
            if not isinstance(name, str) or not name.isidentifier():
                raise ParameterError(
                    f"{self.name}: expected names of letters, digits and _, got {name!r:.80}"
                )
            if not callable(alternative):
                raise ParameterError(
                    f"{self.name}: alternative {name!r}: expected a function, got"
                    f" {alternative!r:.80}"
                )

    def with_plugins(self, config: LabConfig, plugins: Plugins, *, only: bool = False) -> LabConfig:
        """Add a user's names to the config's alternatives, or replace labkit's if `only`."""
        if only and not plugins.alternatives:
            raise ParameterError(
                f"{self.name}: only=True measures alternatives of yours: pass some"
            )
        if self.plugin_parameter is None:
            return config
        labkits = getattr(config, self.plugin_parameter)
        if only:  # baselines stay, since ratios are to them
            baselines = {question.baseline for question in self.comparisons}
            labkits = [name for name in labkits if name in baselines]
        return config.model_copy(update={self.plugin_parameter: [*labkits, *plugins.alternatives]})

    def worker_with(self, plugins: Plugins) -> Callable[..., Any]:
        """Return the worker, which registers the plugins in its rank first."""
        if not plugins.alternatives:
            return self.worker
        # Calls are counted only for `lab.check`: to look at each operator would lengthen times.
        work = run_with_plugins if plugins.noted is None else run_counted
        return partial(work, self.register, plugins, self.worker)

    def answers(self, results: Results) -> dict[str, Answer]:
        """Answer each question from a run's results, by its id."""
        named = replace(results, alternatives=self.alternatives, names=self.names)
        return {question.id: question.answer(named) for question in self.questions}

    def question(self, identifier: str) -> Question:
        """Look up a question. ParameterError, with the nearest id, if there is none."""
        questions = {question.id: question for question in self.questions}
        if identifier not in questions:
            raise ParameterError(f"no question {identifier!r}{nearest(identifier, questions)}")
        return questions[identifier]


def find_lab(name: str) -> Lab:
    """Import a lab by its name."""
    # Not at the top of a module: labs import this package.
    lab: Lab = import_module(f"labkit.studies.{name}.lab").LAB
    return lab
