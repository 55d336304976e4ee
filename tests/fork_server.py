"""Modules that the fork server of the tests loads once, so that no rank of the many groups has to.

Whatever makes an optimizer, profiles or wraps a model loads the compiler: 1.4 s in every rank; what trains on digits
loads scikit-learn. A rank whose worker stands in a module of tests imports that module, and with it pytest, pandas and
matplotlib: another second. The labs' own reports, and all that runs as a program of its own, do without.
"""

from pathlib import Path

import labkit.studies
from labkit.parallel.ranks.fork_server import PRELOADED

OF_WORKERS = ("torch._dynamo", "torch.distributed.optim", "sklearn.datasets")
OF_TESTS = ("pytest", "hypothesis", "matplotlib.pyplot", "labkit.lab.figures", "labkit.lab.runs.measure")


def preload(*modules: str) -> None:
    """Have the fork server load these, too, and the workers of all labs."""
    studies = Path(labkit.studies.__file__).parent
    workers = [f"labkit.studies.{path.parent.name}.worker" for path in sorted(studies.glob("*/worker.py"))]
    PRELOADED.extend([*OF_WORKERS, *workers, *modules])
