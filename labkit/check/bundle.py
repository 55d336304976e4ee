"""What a bug report needs, in one zip: machine, check, runs, failures with tracebacks, kernels; nothing personal."""

import getpass
import io
import json
import re
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from labkit.check.checking import CheckResult
from labkit.lab.commands.doctor import machine_rows
from labkit.lab.project import project_root, runs_directory, write_file
from labkit.lab.runs.store import Run, RunFileError
from labkit.machine import describe_machine
from labkit.studies import LABS

LARGEST_RUN = 5 * 2**20
ANYWHERE_ELSE = re.compile(r"(?<![\w/<>.~-])(?<!:/)/(?:[\w.@+-]+/)+(?=[\w.@+-])")
"""The folders of an absolute path; the name of the file stays."""
HOST = re.compile(r'"host": ?"([^"]+)"')
COMMON_NAMES = ("root", "user", "ubuntu", "admin")
"""Names of users that say nothing of a person, and are words of other texts."""


def write_bundle(path: Path, result: CheckResult, document: Mapping[str, Any]) -> None:
    """Write the zip, whole or not at all. `document` is the check's JSON. OSError if it cannot be written."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in _files(result, document):
            archive.writestr(name, text)
    write_file(path, file.getvalue())


def _files(result: CheckResult, document: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "doctor.txt", scrub("".join(f"{name}: {value}\n" for name, value in machine_rows()))
    yield "check.json", scrub_json(json.dumps(document))
    yield "check.jsonl", scrub_json(result.run.path.read_text())
    yield "kernels.txt", _kernels(result.run)
    wrong = [f"{one.lab}, {one.name}: {one.reason}\n{one.details}" for one in result.correctness if one.is_bad]
    wrong += [f"{point}: {reason}\n{details}" for point, reason, details in result.failures]
    yield "failures/check.txt", scrub("\n\n".join(wrong))
    for lab in LABS:
        newest = max((runs_directory() / lab).glob("*.jsonl"), default=None, key=lambda path: path.stat().st_mtime)
        if newest is None or newest.stat().st_size > LARGEST_RUN:
            continue
        yield f"runs/{lab}.jsonl", scrub_json(newest.read_text(encoding="utf-8", errors="replace"))
        if failures := _failures(newest):
            yield f"failures/{lab}.txt", scrub(failures)


def _failures(path: Path) -> str:
    """Reason and details (traceback, last output of the rank) of each point that did not end well."""
    try:
        run = Run.load(path)
    except RunFileError as error:
        return str(error)
    return "\n\n".join(f"{point}: {reason}\n{details}" for point, reason, details in run.failures())


def _kernels(run: Run) -> str:
    """Registers and spilled bytes of each kernel of labkit that the check compiled on a GPU."""
    frame = run.frame().reindex(columns=["device", "kernel", "registers", "spills"]).dropna(subset="kernel")
    return frame.drop_duplicates().to_string(index=False) if len(frame) else "no kernels were launched\n"


def scrub_json(lines: str) -> str:
    """The JSON lines with every text scrubbed; hosts as keys, too. A line that is no JSON is scrubbed as text."""
    hosts = frozenset(HOST.findall(lines))
    return "".join(_scrub_line(line, hosts) + "\n" for line in lines.splitlines())


def _scrub_line(line: str, hosts: frozenset[str]) -> str:
    try:
        return json.dumps(_scrub_value(json.loads(line), hosts))
    except (ValueError, RecursionError):
        return scrub(line, hosts)


def _scrub_value(value: Any, hosts: frozenset[str]) -> Any:
    if isinstance(value, str):
        return scrub(value, hosts)
    if isinstance(value, list):
        return [_scrub_value(one, hosts) for one in value]
    if isinstance(value, dict):
        return {"host" if name in hosts else name: _scrub_value(one, hosts) for name, one in value.items()}
    return value


def scrub(text: str, hosts: frozenset[str] = frozenset()) -> str:
    """The text without names of user and hosts, and without folders outside of the project."""
    places = {
        str(project_root()): "PROJECT",
        str(Path(__file__).parents[2]): "LABKIT",
        sys.prefix: "PYTHON",
        sys.base_prefix: "PYTHON",
        tempfile.gettempdir(): "TMP",
    }
    for place, word in sorted(places.items(), key=lambda item: -len(item[0])):
        if len(place) > 1:
            text = text.replace(place, word)
    return scrub_names(ANYWHERE_ELSE.sub("ELSEWHERE/", text), hosts)


def scrub_names(text: str, hosts: frozenset[str] = frozenset()) -> str:
    """The text without names of user and hosts; what looks like a path in a picture or a table stays."""
    names = {describe_machine().host, *hosts}
    words = {short: "host" for name in names for short in (name, name.partition(".")[0])}
    words |= dict.fromkeys(_users(), "user")
    for name, word in words.items():
        if len(name) > 1 and name not in COMMON_NAMES:
            text = re.sub(rf"(?<![^\W_]){re.escape(name)}(?![^\W_])", word, text)
    return text


def _users() -> Iterator[str]:
    with suppress(KeyError, OSError):  # a container's user may have no name
        yield getpass.getuser()
    with suppress(RuntimeError, KeyError):
        yield Path.home().name
