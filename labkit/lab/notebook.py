"""What a notebook calls: open the lab, measure, show figures and tables, answer, close."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from IPython.core.getipython import get_ipython
from IPython.display import display
from rich.console import Console

from labkit.lab import wording
from labkit.lab.answers import Check
from labkit.lab.config import LabConfig, ParameterError, resolve_config
from labkit.lab.declaration import Lab
from labkit.lab.facts import Answer, Note
from labkit.lab.figures import Figure
from labkit.lab.figures.draw import draw
from labkit.lab.figures.plot import Plot
from labkit.lab.pages import cards
from labkit.lab.pages.record import run_card
from labkit.lab.parameters import Parameters, check_papermill_cell, check_parameters, locate_run
from labkit.lab.project import check_writable, figures_directory, notebook_path
from labkit.lab.runs.budget import with_more_rounds
from labkit.lab.runs.measure import calibrate, measure, needs_calibration, resume
from labkit.lab.runs.progress import MeasuringInterrupted, NotebookLine, ShowProgress, terminal_line
from labkit.lab.runs.store import Run
from labkit.lab.user_checks import (
    NAME,
    AlternativeCheck,
    check_alternative,
    check_guesses,
    save_check,
    with_guesses,
)
from labkit.lab.user_worker import NO_PLUGINS, Plugins
from labkit.lab.wording import describe_note
from labkit.machine.description import Machine, describe_machine


def open_lab(
    study: Lab,
    /,
    *,
    profile: str = "quick",
    run: str | None = None,
    config: Mapping[str, Any] | None = None,
    **parameters: Any,
) -> "OpenLab":
    """Open a lab with parameters, in a notebook or a script.

    Args:
        study: the lab, such as `labkit.studies.all_reduce.lab.LAB`.
        profile: "smoke", "quick" or "paper".
        run: path or name of a run to plot instead of measuring.
        config: any fields of the lab's config by name.
        **parameters: fields of the lab's config; None leaves what the profile says.

    Raises:
        ParameterError: for a wrong name or value here, or on papermill's command line.
    """
    # What the notebook passed, to compare with what papermill's command line has set.
    passed = {"profile": profile, "run": run, "config": config, **parameters}
    check_papermill_cell(study, getattr(get_ipython(), "user_ns", {}).get("In", []), passed)
    return OpenLab(study, check_parameters(study, passed))


class OpenLab:
    """One lab inside one notebook: the parameters, the run once there is one, and its answers."""

    def __init__(self, study: Lab, parameters: Parameters):
        self.study = study
        self.parameters = parameters
        self._run: Run | None = None
        self._plugins = NO_PLUGINS
        self._interrupted: Path | None = None
        self._answers: dict[str, Answer] = {}
        self._guess: dict[str, float] = {}

    def but(self, **changed: Any) -> "OpenLab":
        """Open the same lab with some parameters changed. ParameterError for wrong ones.

        It measures a run of its own, so that both can be compared.
        """
        parameters = self.parameters
        # The present config stands in for the profile, so that earlier changes stay.
        profiles = {parameters.profile: parameters.config}
        config = resolve_config(self.study.name, profiles, parameters.profile, changed)
        return OpenLab(self.study, Parameters(parameters.profile, None, config))

    @property
    def config(self) -> LabConfig:
        return self.parameters.config

    @property
    def run(self) -> Run:
        """The run that was measured or read. ValueError before `measure()`."""
        if self._run is None:
            raise ParameterError("nothing is measured yet: call lab.measure() first")
        return self._run

    @property
    def machine(self) -> Machine:
        """The machine of the run: this one, unless a recorded run is drawn."""
        return self._run.header.machine if self._run else describe_machine()

    def machine_card(self) -> None:
        """Show the machine."""
        self._read_run()
        display(cards.machine_card(self.machine))

    def measure(
        self,
        alternatives: Mapping[str, Any] | None = None,
        *,
        guess: Mapping[str, float] | None = None,
        only: bool = False,
        more: float | None = None,
    ) -> pd.DataFrame:
        """Measure, or read the run that `run` names; show the coverage; return the frame.

        Args:
            alternatives: yours by name, such as `{"mine": my_all_reduce}`; checked, interleaved
                with labkit's and plotted with them. See the docstring of the lab's `register`.
            guess: your numbers by the names of rows, shown next to the measured ones.
            only: whether to measure yours alone, with the baseline, without labkit's.
            more: seconds of rounds in addition, which decide what an answer leaves open.

        Returns:
            One row per (point, rank, repeat), units in the column names.
        """
        # Before anything is measured: a wrong name would be noticed minutes later.
        self._guess = check_guesses(guess or {})
        self._interrupted = None
        check_writable(figures_directory() / self.study.name)
        if self.parameters.run is not None:
            if alternatives:
                run = self.parameters.run
                raise ParameterError(
                    f"run = {run!r} is plotted, not measured: set run = None to measure yours"
                )
            self._read_run()
            display(cards.coverage(self.run))
        else:
            self._plugins = Plugins(alternatives or {})
            self.study.check_plugins(self._plugins)
            config = self.config
            if more is not None:
                config = with_more_rounds(self.study, config, more)
            begin = partial(
                measure,
                self.study,
                config,
                profile=self.parameters.profile,
                only_plugins=only,
                on_start=partial(setattr, self, "_interrupted"),
            )
            self._run = self._measure(begin)
        self._answers = {}
        return self.run.frame()

    def check(self, alternative: Callable[..., Any]) -> AlternativeCheck:
        """Check one alternative of yours within seconds: right, wrong (and where), fails, or hangs.

        `.status` is an exit status for a grader. The verdict is kept for `labkit hand-in`.
        ParameterError as `measure`.
        """
        result = check_alternative(self.study, alternative)
        save_check(self.study, alternative, result)
        return result

    def resume(self) -> pd.DataFrame:
        """Measure the rest of an interrupted `measure()`. ParameterError if none began."""
        if self._interrupted is not None:
            self._run = self._measure(partial(resume, self.study, self._interrupted))
            self._answers = {}
        elif self._run is None:
            raise ParameterError("nothing was interrupted here: call lab.measure()")
        return self.run.frame()

    def source(self, *studied: Any) -> None:
        """Show the source of functions or classes. ValueError for objects without source."""
        for item in studied:
            display(cards.render_source(item))

    def table(self, frame: pd.DataFrame, caption: str = "") -> None:
        """Show a frame as an aligned table, values with their units."""
        display(cards.table(frame, caption))

    def show(self, figure: Plot | Figure, name: str, caption: str = "") -> None:
        """Show a figure that belongs to no question; save it and its points under `figures/`."""
        plot = draw(figure, self.run.results()) if isinstance(figure, Figure) else figure
        display(self._figure(plot, name, caption or name, caption))

    def answer(self, question_id: str) -> None:
        """Show the answer to a question: headline, figure, table. ValueError for an unknown id."""
        question = self.study.question(question_id)
        answer = self.answers()[question_id]
        figures = []
        if question.figure is not None and answer.verdict != "not measured":
            results = self.run.results()
            plot = draw(question.figure, results, answer.table)
            if len(plot.data):
                caption = question.figure.caption(results, answer.table)
                figures.append(self._figure(plot, question_id, question.text, caption))
        if self._guess and isinstance(question, Check):
            answer = with_guesses(question, answer, self._guess)
        display(cards.answer(question, answer, figures))

    def guesses(self, question_id: str) -> None:
        """Show guesses next to predictions and measurements. ValueError for other questions."""
        question = self.study.question(question_id)
        if not isinstance(question, Check):
            raise ParameterError(
                f"{question_id} predicts nothing: expected a question on predictions"
            )
        answer = self.answers()[question_id]
        if self._guess:
            answer = with_guesses(question, answer, self._guess)
        if answer.table is None:
            display(cards.note(wording.headline(answer)))
        else:
            display(cards.table(answer.table, "Guesses, predictions and measurements"))

    def answers(self) -> dict[str, Answer]:
        """Answers to all questions by id."""
        if not self._answers:
            self._answers = self.study.answers(self.run.results())
        return self._answers

    def close(self) -> None:
        """Show where the numbers come from and how to get them again."""
        display(run_card(self.study, self.run))

    def _figure(self, plot: Plot, name: str, alt: str, caption: str = "") -> cards.Piece:
        """Save a figure and make its piece."""
        plot.save(figures_directory() / self.study.name / self.run.name / name)
        return cards.figure(plot, alt, f"{self.study.name}_{name}", caption)

    def _read_run(self) -> None:
        text = self.parameters.run
        if text is None or self._run is not None:
            return
        run = Run.load(locate_run(self.study, text))
        if run.header.lab != self.study.name:
            raise ParameterError(
                f"{text} is a run of {run.header.lab!r}, not of {self.study.name!r}"
            )
        self._run = run

    def _measure(self, measure_all: Callable[..., Run]) -> Run:
        # IPython in a terminal has no kernel, and displays no HTML.
        line = NotebookLine() if hasattr(get_ipython(), "kernel") else None
        in_terminal = terminal_line(Console(stderr=True), "measuring")
        try:
            with in_terminal if line is None else nullcontext(line.update) as show:
                # A run that goes on has been through both.
                if self._interrupted is None:
                    self._calibrate(show)
                    self._refuse_failing()
                run = measure_all(plugins=self._plugins, on_progress=show, on_output=print)
        except KeyboardInterrupt:
            raise MeasuringInterrupted(f"interrupted{self._resume_hint()}") from None
        self._interrupted = None
        if line is None:
            display(cards.coverage(run))
        else:
            line.show(cards.coverage(run).data)
        self._show_failures(run)
        return run

    def _calibrate(self, show: ShowProgress) -> None:
        if needs_calibration([self.study], self.parameters.profile):
            calibrate(
                lambda now: show(replace(now, text=f"limits of this machine: {now.text}")), print
            )

    def _resume_hint(self) -> str:
        if self._interrupted is None:
            return ""
        hint = "; what was measured is kept: frame = lab.resume() goes on"
        # A terminal does not have the functions of this notebook.
        if self._plugins != NO_PLUGINS:
            return hint
        command = f"labkit measure {self.study.name} --resume {self._interrupted.stem}"
        return f"{hint}, or in a terminal `{command}`"

    def _show_failures(self, run: Run) -> None:
        """Say below the coverage why an alternative of the reader's own has no values."""
        names = list(self._plugins.alternatives)
        notes: dict[Note, None] = {}
        for question in self.study.comparisons:
            notes |= dict.fromkeys(question.metric.failures(run.frame(), names))
        for note in notes:
            display(cards.note(describe_note(note)))

    def _refuse_failing(self) -> None:
        """ParameterError, within seconds, for an alternative that ends its point."""
        # Every point with several ranks would wait for it in vain, or fail with it.
        for name, alternative in self._plugins.alternatives.items():
            result = check_alternative(self.study, alternative)
            # Without the name, it is the baseline that is slow today.
            if result.verdict in ("hangs", "fails") and f"in {NAME}" in result.details:
                raise ParameterError(
                    f"{self.study.name}: nothing was measured: {name} {result.verdict}:"
                    f" {result.details}"
                )


def labs_table(studies: Iterable[Lab]) -> str:
    """Return a Markdown table of labs for the tour: a link to each notebook, and what it shows."""
    rows = ["| lab | what it shows | questions |", "|---|---|---|"]
    for study in studies:
        link = f"[{study.title}]({notebook_path(study.name).name})"
        rows.append(f"| {link} | {study.summary} | {len(study.questions)} |")
    return "\n".join(rows)
