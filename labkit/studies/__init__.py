"""The labs: one package each, same name as its notebook and its page. Studies never import one another.

``study``     parameters, points
``worker``    what every rank runs for a point
``tables``    from a run's frame to what findings and figures are made of
``findings``  what the lab asks, and how a run answers

What else a lab has says in its first line what it is for.

Imports nothing by itself: a rank that measures a point imports `labkit.studies.<lab>.worker` through here.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from labkit.lab.declaration import Lab

LABS = (
    "limits",
    "training_step",
    "precision",
    "memory",
    "attention",
    "all_reduce",
    "data_parallel",
    "sharding",
    "sync_batchnorm",
    "cifar100",
    "tuned_step",
)
ON_ONE_PAGE = set(LABS) - {"sharding"}


def load_lab(lab: str) -> "Lab":
    """The declaration of a lab, imported on demand. ParameterError for a name that is no lab's."""
    from labkit.lab.config import ParameterError, nearest

    if lab not in LABS:
        raise ParameterError(f"unknown lab {lab!r:.300}{nearest(lab, LABS)}; the labs are {', '.join(LABS)}")
    if lab in ON_ONE_PAGE:
        declaration: Lab = import_module(f"labkit.studies.{lab}.lab").LAB
        return declaration
    study: Any = import_module(f"labkit.studies.{lab}.study").STUDY
    return study


def modules_of_labs(name: str, labs: "Iterable[str]") -> list[str]:
    """The module "study" or "worker" of each lab, for who imports them ahead of their use."""
    return [f"labkit.studies.{lab}.{'lab' if name == 'study' and lab in ON_ONE_PAGE else name}" for lab in labs]
