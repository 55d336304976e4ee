"""Is a reader's own alternative right? The lab's correctness check alone, within seconds."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from labkit.lab.config import ParameterError
from labkit.lab.declaration import Lab
from labkit.lab.runs.measure import measure

NAME = "mine"
DEADLINE_S = 20.0
"""Of one point: who takes longer hangs."""
RANKS = (2, 3, 4)
"""Two ranks have one route; a mistake in the order of messages shows with three or four."""
SHORTEST = {"repeats": 1, "warmup": 0, "sessions": 1, "timeout_s": DEADLINE_S}
UNEVEN_BYTES = 4088  # 1,022 elements of float32, which neither three nor four ranks divide evenly

Verdict = Literal["right", "wrong", "fails", "hangs"]
VERDICTS: tuple[Verdict, ...] = ("right", "wrong", "fails", "hangs")


@dataclass(frozen=True)
class OwnCheck:
    """What the check says of a reader's own alternative."""

    verdict: Verdict
    details: str = ""
    """Where it is wrong, what it raises, or on how many ranks it hangs."""

    @property
    def status(self) -> int:
        """Exit status for a grader: 0 right, 1 wrong, 2 fails, 3 hangs."""
        return VERDICTS.index(self.verdict)

    def __bool__(self) -> bool:
        return self.verdict == "right"

    def __str__(self) -> str:
        return f"{self.verdict}: {self.details}" if self.details else self.verdict

    def _repr_markdown_(self) -> str:
        return f"**{self.verdict}**" + (f": {self.details}" if self.details else "")


def check_own(lab: Lab, own: Callable[..., Any]) -> OwnCheck:
    """Check one alternative at the lab's smallest sizes on 2, 3 and 4 ranks, where it has ranks; nothing is kept.

    It ends at the first result that is not right. ParameterError, before anything starts, for a lab that compares
    nothing of the kind, and for what is no function.
    """
    if lab.plugin_parameter is None:
        raise ParameterError(f"{lab.name}: compares nothing that a reader could add to")
    names = lab.config.model_fields
    settings = {"sizes_bytes": [UNEVEN_BYTES], **SHORTEST}
    for ranks in RANKS if "world_sizes" in names else (1,):
        wanted = settings | {"world_sizes": [ranks]}
        result = _check(lab, own, {name: value for name, value in wanted.items() if name in names})
        if not result:
            where = f", on {ranks} ranks" if ranks > 1 else ""
            return replace(result, details=f"{result.details}{where}")
    return OwnCheck("right")


def _check(lab: Lab, own: Callable[..., Any], settings: Mapping[str, Any]) -> OwnCheck:
    config = lab.configure("smoke", settings)
    with TemporaryDirectory(prefix="labkit-check-") as folder:
        mine = {NAME: own}
        run = measure(lab, config, profile="smoke", alternatives=mine, only_plugins=True, directory=Path(folder))
    ends = run.coverage()
    for status, reason in zip(ends["status"], ends["reason"], strict=True):
        if status != "ok":
            return OwnCheck("hangs" if status == "timeout" else "fails", str(reason))
    rows = run.frame()
    checks = rows[rows.eq(NAME).any(axis=1)].get("check")
    if checks is None or checks.dropna().empty:
        return OwnCheck("fails", "it was not measured")
    for check in checks.dropna():
        if check != "ok":
            kind, _, details = str(check).partition(": ")
            return OwnCheck("wrong" if kind == "wrong" else "fails", details)
    return OwnCheck("right")
