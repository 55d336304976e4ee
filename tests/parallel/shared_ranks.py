"""Checks that run on ranks which live as long as the session, a test per check and number of ranks.

    @on_ranks(2, 3, slow=[5])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_it_adds_up(dtype):
        ...  # on every rank

A check is one point of a launch (`labkit.parallel.launch`). The launch has more points than there
are checks, and the ranks find in files which function the next one calls, and with what. If ranks
die or hang, that check fails, and the next one gets new ranks.
"""

import atexit
import inspect
import pickle
import re
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from labkit.parallel.launch import PointEnd, RankError, launch
from labkit.parallel.ranks.serialization import serialize

Check = Callable[..., None]
"""Runs on every rank, and raises if something is wrong."""

MAX_CHECKS = 10_000  # of a session, per number of ranks
TIMEOUT_S = 240.0  # of one check


def on_ranks(*quick: int, slow: Sequence[int] = ()) -> Callable[[Check], Callable[..., None]]:
    """Make a check a test on each of these numbers of ranks; `make test-all` has the `slow` ones.

    Without numbers the check has a parameter `world_size`. Stands above the marks of the check.
    """
    sizes = [pytest.param(p) for p in quick]
    sizes += [pytest.param(p, marks=pytest.mark.slow) for p in slow if p not in quick]

    def decorate(check: Check) -> Callable[..., None]:
        parameters = inspect.signature(check, follow_wrapped=False).parameters

        def test(world_size: int, **arguments: Any) -> None:
            if "world_size" in parameters:
                arguments["world_size"] = world_size
            _run_check(check, arguments, world_size)

        # pytest reads the names of a test's parameters off its signature.
        names = dict.fromkeys(["world_size", *parameters])
        test.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
        )
        test.__name__ = check.__name__
        test.__doc__ = check.__doc__
        # Away from the check: all parameters would travel to the ranks with each of its calls.
        test.pytestmark = vars(check).pop("pytestmark", [])  # type: ignore[attr-defined]
        return pytest.mark.parametrize("world_size", sizes)(test) if sizes else test

    return decorate


def _run_check(check: Check, arguments: dict[str, Any], world_size: int) -> None:
    """Run a check on that many ranks. RankError if it raises."""
    ranks = _shared_ranks(world_size)
    ranks.next_task(check, arguments)
    for item in ranks.items:
        if isinstance(item, PointEnd):
            if item.failure is not None:
                raise RankError(item.failure)
            return
    raise AssertionError(f"more than {MAX_CHECKS} checks")


class _SharedRanks:
    """A launch whose points are tasks in a folder."""

    def __init__(self, world_size: int) -> None:
        self._folder = TemporaryDirectory(prefix="labkit-checks-")
        self._n_tasks = 0
        self._checks: dict[Check, Path] = {}
        worker = partial(_run_task, Path(self._folder.name))
        points = range(MAX_CHECKS)
        self.items = launch(worker, points, world_size=world_size, timeout_s=TIMEOUT_S)
        atexit.register(self._close)

    def next_task(self, check: Check, arguments: dict[str, Any]) -> None:
        """Put down what the next point is."""
        folder = Path(self._folder.name)
        # Once: a check takes the globals that it uses along, which may be all cases of a module.
        if check not in self._checks:
            self._checks[check] = folder / f"check-{len(self._checks)}"
            self._checks[check].write_bytes(serialize(check))
        (folder / str(self._n_tasks)).write_bytes(serialize((self._checks[check], arguments)))
        self._n_tasks += 1

    def _close(self) -> None:
        self.items.close()
        self._folder.cleanup()


@cache
def _shared_ranks(world_size: int) -> _SharedRanks:
    return _SharedRanks(world_size)


def _run_task(folder: Path, point: int) -> None:
    """In a rank: run the check of this point, and destroy the groups that it made.

    torch names a group that only its members make (`use_local_synchronization`) by how many groups
    a rank is in. With leftovers on some ranks the names would differ, and the ranks would wait.
    """
    path, arguments = pickle.loads((folder / str(point)).read_bytes())
    check = _load_check(path)
    groups = distributed_c10d._world.pg_map
    before = set(groups)
    torch.manual_seed(0)  # else what ran before on one rank alone would decide about its models
    assert check(**arguments) is None, "a check asserts, and returns nothing"
    # A rank that is done would close the connections of one that still waits for a message.
    dist.barrier()
    for group in set(groups) - before - _kept_groups:
        dist.destroy_process_group(group)


@cache
def shared_mesh(sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Return a mesh of all ranks whose groups live as long as the ranks. A collective.

    torch's caches of DTensor operations have the groups of the first of several equal meshes.
    """
    before = set(distributed_c10d._world.pg_map)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    _kept_groups.update(set(distributed_c10d._world.pg_map) - before)
    return mesh


_kept_groups: set[dist.ProcessGroup] = set()


@cache
def _load_check(path: Path) -> Check:
    return pickle.loads(path.read_bytes())


def assert_refused(expected: str, call: Callable[[], object], *kinds: type[Exception]) -> None:
    """A call raises one line with a text, as a ValueError or one of these kinds.

    A text is a must: else a mistake in the call, as a name of an argument that is gone, would pass
    for a refusal.
    """
    assert expected
    with pytest.raises((ValueError, *kinds), match=re.escape(expected)) as refusal:
        call()
    assert "\n" not in str(refusal.value)
