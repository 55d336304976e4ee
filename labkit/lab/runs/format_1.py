"""Reads rows of format 1, of baselines and hand-ins that were saved before rows had a status.

Format 1 said how a row ended in the words of its columns `check` and `not_measured`.
"""

from typing import Any

FORMAT = 1
# The column `check` was a sentence: how it began is all that tells these apart.
STATUSES = (
    ("wrong: ", "wrong"),
    ("right, but too slow to time: ", "too_slow"),
    ("failed: ", "failed"),
)


def with_status(values: dict[str, Any]) -> dict[str, Any]:
    """Return a row's values with `status` and `reason` for the columns of format 1."""
    others = {name: one for name, one in values.items() if name not in ("check", "not_measured")}
    if "not_measured" in values:
        return others | {"status": "refused", "reason": str(values["not_measured"])}
    if "check" not in values:
        return others
    check = str(values["check"])
    if check == "ok":
        return others | {"status": "ok"}
    for beginning, status in STATUSES:
        if check.startswith(beginning):
            return others | {"status": status, "reason": check.removeprefix(beginning)}
    # Anything else was the error with which an alternative failed.
    return others | {"status": "failed", "reason": check}
