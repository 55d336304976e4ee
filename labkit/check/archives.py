"""Zips without personal data: the bundle of a bug report, and what `hand_in` writes."""

import getpass
import io
import json
import re
import sys
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

from labkit.check.checking import CheckResult
from labkit.lab.commands.doctor import machine_rows
from labkit.lab.project import PACKAGE, project_root, runs_directory, write_file
from labkit.lab.runs.store import Run, RunFileError
from labkit.machine.description import describe_machine
from labkit.studies import LABS

# Of one file: a bundle or a hand-in is uploaded, and whoever opens it reads it into memory.
MAX_BYTES = 50 * 2**20
# By this file a hand-in is known, and it alone keeps names.
CARD = "hand-in.json"
# Folders of an absolute path, in text, JSON or HTML. The file's name stays, which tracebacks need,
# and so do URLs, tags, and pictures in base64.
FOLDERS = re.compile(r"(?:(?<=\\[nrt])|(?<![\w/<>.~+-]))(?<!:/)/(?:[\w.@+-]+/)+(?=[\w.@+-])")
HOST = re.compile(r'"host": ?"([^"]+)"')
CLOCK_TOLERANCE = timedelta(hours=1)
# User names that identify nobody.
COMMON_NAMES = ("root", "user", "ubuntu", "admin")


@cache
def _labkit_words() -> frozenset[str]:
    """Return the words of labkit's source, of which runs are made."""
    words = set[str]()
    for path in PACKAGE.rglob("*.py"):
        words.update(re.findall(r"[A-Za-z0-9]+", path.read_text(encoding="utf-8").lower()))
    return frozenset(words)


def scrub(text: str) -> str:
    """Return text, JSON lines or HTML without names of users and hosts, and without folders."""
    places = {
        project_root(): "PROJECT",
        Path(__file__).parents[2]: "LABKIT",
        Path(sys.prefix): "PYTHON",
    }
    # The deepest first, since one may lie in another; a root of "/" would replace every slash.
    for place, word in sorted(places.items(), key=lambda item: -len(item[0].parts)):
        if len(place.parts) > 1:
            text = text.replace(str(place), word)
    text = FOLDERS.sub("ELSEWHERE/", text)
    hosts = {describe_machine().host, *HOST.findall(text)}
    words = {short: "host" for name in hosts for short in (name, name.partition(".")[0])}
    for find_name in (getpass.getuser, lambda: Path.home().name):
        # A container's user may have no name, or no folder.
        with suppress(KeyError, OSError, RuntimeError):
            user_name = find_name()
            words[user_name] = "user"
            # JSON spells a name with an accent in another way.
            words[json.dumps(user_name)[1:-1]] = "user"
    text = HOST.sub('"host": "host"', text)
    for name, word in words.items():
        if len(name) > 1 and name not in COMMON_NAMES:
            text = _replace_name(text, name, word)
    return text


def _replace_name(text: str, name: str, word: str) -> str:
    """Replace a name where it stands alone."""
    # No letter or digit beside it: "max" is no part of "maximum".
    pattern = rf"(?<![^\W_]){re.escape(name)}(?![^\W_])"
    # A host called `cuda`, or a user called `max`, must not change what a run says: such names are
    # replaced in `max@cuda` only.
    if name.lower() in _labkit_words():
        return re.sub(rf"{pattern}(?=@)|(?<=@){pattern}", word, text)
    # Keys of JSON stay: a run is read again. A key with a list is a host with its ranks.
    return re.sub(rf'{pattern}(?!":\s?[^\s\[])', word, text)


def write_zip(path: Path, files: Mapping[str, str]) -> None:
    """Write the zip, whole or not at all; nothing but the card keeps names and folders."""
    # In memory: a disk that is full leaves no half of a zip, which would be handed in.
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, text in files.items():
            if name != CARD:
                text = scrub(text)
            # Without a time: a zip has none before 1980, where a clock without a battery begins.
            info = zipfile.ZipInfo(name)
            info.external_attr = 0o644 << 16
            archive.writestr(info, text, zipfile.ZIP_DEFLATED)
    write_file(path, file.getvalue())


def newest_run(lab: str) -> Path | None:
    """Return the newest run of a lab, or None."""
    # A run from the future was begun before the clock was set back: any other one is newer.
    runs = sorted((runs_directory() / lab).glob("*.jsonl"))
    limit = f"{datetime.now(UTC) + CLOCK_TOLERANCE:%Y%m%dT%H%M%SZ}"
    return max((run for run in runs if run.name < limit), default=max(runs, default=None))


def write_bundle(path: Path, result: CheckResult, document: Mapping[str, Any]) -> None:
    """Write machine, check (`document`), newest runs, failures with tracebacks, and kernels."""
    columns = ["device", "kernel", "registers", "spills"]
    kernels = result.run.frame().reindex(columns=columns).dropna(subset="kernel")
    kernels_text = "no kernels launched\n"
    if len(kernels):
        kernels_text = kernels.drop_duplicates().to_string(index=False)
    failures = [
        f"{outcome.lab}, {outcome.title}: {outcome.reason}\n{outcome.details}"
        for outcome in result.correctness
        if outcome.is_bad
    ]
    files = {
        "doctor.txt": "".join(f"{name}: {value}\n" for name, value in machine_rows()),
        "check.json": json.dumps(document),
        "kernels.txt": kernels_text,
    }
    for lab, run in {"check": result.run.path, **{lab: newest_run(lab) for lab in LABS}}.items():
        if run is not None and run.stat().st_size <= MAX_BYTES:
            # Damaged runs, too: they may be what the report is about.
            files[f"runs/{lab}.jsonl"] = run.read_text(encoding="utf-8", errors="replace")
            try:
                failures += [
                    f"{lab}, {point}: {why}\n{details}"
                    for point, why, details in Run.load(run).failures()
                ]
            except RunFileError as error:
                failures.append(f"{lab}: {error}\n")
    write_zip(path, files | {"failures.txt": "\n\n".join(failures)})
