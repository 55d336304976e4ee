"""One fork server for all processes of the tests, and modules that it loads, so that no rank of the
many groups has to.

Whatever makes an optimizer, profiles or wraps a model loads the compiler: 1.4 s in every rank; what
trains on digits loads scikit-learn. A rank whose worker stands in a module of tests imports that
module, and with it pytest, pandas and matplotlib: another second. The labs' own reports, and all
that runs as a program of its own, do without.
"""

import socket
import threading
from pathlib import Path

import pytest

import labkit.studies
from labkit.lab.project import checkout
from labkit.parallel.ranks import fork_server

OF_WORKERS = ("torch._dynamo", "torch.distributed.optim", "sklearn.datasets")
OF_TESTS = (
    "pytest",
    "hypothesis",
    "matplotlib.pyplot",
    "labkit.lab.figures.draw",
    "labkit.lab.runs.measure",
)


def preload(*modules: str) -> None:
    """Have the fork server load these, too, and the workers of all labs."""
    studies = Path(labkit.studies.__file__).parent
    workers = [
        f"labkit.studies.{path.parent.name}.worker" for path in sorted(studies.glob("*/worker.py"))
    ]
    fork_server.PRELOADED.extend([*OF_WORKERS, *workers, *modules])


def lend(address: Path) -> None:
    """Start the fork server, and give its connection to every process that calls `borrow`."""
    server = fork_server.start_server()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(address))
    listener.listen()

    def give() -> None:
        while True:
            with listener.accept()[0] as borrower:
                socket.send_fds(borrower, [str(server.pid).encode()], [server.control.fileno()])

    threading.Thread(target=give, daemon=True).start()


def borrow(address: Path) -> None:
    """Use the fork server of the process that lends it."""
    with socket.socket(socket.AF_UNIX) as lender:
        lender.connect(str(address))
        pid, (control,), *_ = socket.recv_fds(lender, 20, 1)
    fork_server.server = fork_server.Server(socket.socket(fileno=control), int(pid))


def share_with_kernels(address: Path, patch: pytest.MonkeyPatch) -> None:
    """Let kernels that start from now on import tests, and use the server that is lent at this
    address, if any."""
    from labkit.lab.pages import execute  # papermill, which neither ranks nor these kernels load

    patch.setenv("PYTHONPATH", str(checkout()))
    if address.exists():
        line = f"__import__('tests.fork_server', fromlist=['']).borrow({str(address)!r})"
        patch.setattr(execute, "KERNEL_START", f"{execute.KERNEL_START}; {line}")
