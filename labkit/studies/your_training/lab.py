"""Your own training: what its step costs, where its time goes, and what each change would gain."""

from collections.abc import Iterator
from typing import Annotated, Any

from labkit.lab.config import ParameterError, TimedConfig, one_of
from labkit.lab.declaration import Lab
from labkit.machine.description import Machine
from labkit.studies.your_training.changes import CHANGES
from labkit.studies.your_training.worker import YourTrainingPoint, measure

ChangeName = Annotated[str, one_of(lambda: CHANGES)]


class YourTrainingConfig(TimedConfig):
    """The parameters of this lab."""

    setup: str = ""
    """ "train.py:setup": a file, and its function (`labkit.studies.your_training.setup`)."""
    arguments: dict[str, Any] = {}
    """Arguments of the setup, for example {"batch": 16}."""
    changes: list[ChangeName] = list(CHANGES)
    """Changes to try, each in turns with the training as it is."""
    rounds_s: float | None = 5.0
    warmup: int = 1


def points(config: YourTrainingConfig, machine: Machine) -> Iterator[YourTrainingPoint]:
    """Plan the step as it is, then all changes in one process, which knows what pays together."""
    if not config.setup:
        raise ParameterError("your_training: expected setup, such as 'train.py:setup'")
    arguments = tuple(sorted(config.arguments.items()))
    yield YourTrainingPoint.of(config, sweep="step", arguments=arguments, changes=())
    if config.changes:
        yield YourTrainingPoint.of(config, sweep="changes", arguments=arguments)


LAB = Lab(
    name="your_training",
    title="Your own training",
    summary="What a step of your training costs, and what each change to it would gain.",
    config=YourTrainingConfig,
    preload=("torch._inductor.compile_fx",),
    worker=measure,
    points=points,
    questions=[],
)
