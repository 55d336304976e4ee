"""The labs: one package each, same name as its notebook and its page.

Studies never import one another.

``lab``     parameters, points and questions, on one page
``worker``  runs on every rank for each point

The first line of any other module of a lab says its purpose. Imports nothing by itself: a rank that
measures a point imports `labkit.studies.<lab>.worker` through here.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
    "model_parallel",
    "context_parallel",
    "your_training",
)


def load_lab(lab: str) -> "Lab":
    """Return the declaration of a lab, imported on demand.

    ParameterError for a name that is no lab's.
    """
    from labkit.lab.config import ParameterError, nearest
    from labkit.lab.declaration import find_lab

    if lab not in LABS:
        raise ParameterError(
            f"unknown lab {lab!r:.300}{nearest(lab, LABS)}; the labs are {', '.join(LABS)}"
        )
    return find_lab(lab)
