"""A teacher's folder of hand-ins: zips and unzipped folders."""

import io
import json
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

from labkit.check.archives import CARD, MAX_BYTES
from labkit.check.hand_in import normalize_name
from labkit.lab.config import ParameterError
from labkit.lab.project import kind_of_path
from labkit.lab.runs.store import Run
from labkit.studies import LABS

# What macOS and Windows add to folders and zips.
IGNORED = ("__MACOSX", ".DS_Store", "Thumbs.db", "desktop.ini")


@dataclass(frozen=True)
class Member:
    """A file of a hand-in, in a folder or in a zip."""

    read_bytes: Callable[[], bytes]
    n_bytes: int

    def read(self) -> bytes:
        """Read the file. ValueError for one that is too large to be a student's."""
        # Before reading: a zip of some KiB may unpack to a size that fills the memory.
        if self.n_bytes > MAX_BYTES:
            size = self.n_bytes >> 20
            raise ValueError(f"a file of {size} MiB, expected at most {MAX_BYTES >> 20}")
        return self.read_bytes()


@dataclass(frozen=True)
class HandIn:
    """What a student handed in, as far as it can be read."""

    file: str
    name: str
    runs: dict[str, Run] = field(default_factory=dict)
    checks: dict[str, dict[str, str]] = field(default_factory=dict)
    """By lab, the last `lab.check`: `verdict`, `details`, `code`."""
    notebooks: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    """By file, its cells: type and source."""
    problems: list[str] = field(default_factory=list)
    """What cannot be read."""


@dataclass(frozen=True)
class ClassFolder:
    """The hand-ins of a folder, and its files that are none."""

    hand_ins: list[HandIn]
    others: list[str]


def holds_hand_ins(name: str) -> bool:
    """Return whether this names a folder with a zip or an unzipped hand-in, in it or below it."""
    if kind_of_path(name) != "folder":
        return False
    # Any zip counts: a page that lists it as no hand-in says more than a refusal of the folder.
    return any(_is_zip(path) or path.name == CARD for path in _files(Path(name)))


def read_class(folder: Path) -> ClassFolder:
    """Read each hand-in of a folder, by file name. A damaged one has a problem instead of runs."""
    hand_ins = list[HandIn]()
    others = list[str]()
    # Safari unzips what it downloads: such a folder is a hand-in with all its files.
    unzipped = {path.parent for path in _files(folder) if path.name == CARD}
    for root in sorted(unzipped):
        members = {
            file.relative_to(root).as_posix(): Member(file.read_bytes, file.stat().st_size)
            for file in _files(root)
        }
        hand_ins.append(_read(str(root.relative_to(folder)), members))
    for path in sorted(_files(folder)):
        file = str(path.relative_to(folder))
        if _is_zip(path):
            in_zip = list(_read_zip(file, path.read_bytes))
            hand_ins.extend(in_zip)
            if not in_zip:
                others.append(file)
        elif not any(path.is_relative_to(root) for root in unzipped):
            others.append(file)
    return ClassFolder(hand_ins, others)


def _files(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder, without those that a system adds."""
    for path in folder.rglob("*"):
        # macOS packs a `._` file with each one.
        is_ignored = any(part in IGNORED or part.startswith("._") for part in path.parts)
        if path.is_file() and not is_ignored:
            yield path


def _is_zip(path: Path | PurePosixPath) -> bool:
    return path.suffix.lower() == ".zip"


def _read_zip(file: str, read: Callable[[], bytes], *, is_inner: bool = False) -> Iterator[HandIn]:
    """Yield the hand-ins of a zip: itself, those in its folders, and those in zips inside it."""
    try:
        with zipfile.ZipFile(io.BytesIO(read())) as archive:
            files = {
                # Some programs of Windows write its separator, against the format.
                PurePosixPath(info.filename.replace("\\", "/")): Member(
                    partial(archive.read, info), info.file_size
                )
                for info in archive.infolist()
                if not info.is_dir() and not info.filename.startswith("__MACOSX")
            }
            # One level deep: zipped again with its folder, or as a platform hands out all at once.
            roots = [path.parent for path in files if path.name == CARD and len(path.parts) <= 2]
            for root in roots:
                members = {
                    str(path.relative_to(root)): member
                    for path, member in files.items()
                    if path.is_relative_to(root)
                }
                yield _read(file, members)
            if roots or is_inner:
                return
            for path, member in files.items():
                if _is_zip(path) and not path.name.startswith("._"):
                    yield from _read_zip(f"{file}/{path}", member.read, is_inner=True)
    # Whatever a damaged or hostile zip raises, the page shows the others.
    except Exception as error:
        yield HandIn(file, _guess_name(file), problems=[f"cannot be read: {error}"])


def _guess_name(file: str) -> str:
    stem = PurePosixPath(file).stem
    return stem.rpartition("hand-in-")[2] or stem


def _read(file: str, members: Mapping[str, Member]) -> HandIn:
    """Read what a hand-in's card lists; what cannot be read becomes a problem."""
    try:
        card = _read_object(members[CARD].read())
        labs = card.get("labs")
        if "name" not in card or not isinstance(labs, list):
            raise ValueError("expected a name and a list of labs")
        # A card is a student's to edit: it may hold anything, at any length.
        name = str(card["name"])[:64]
    except Exception as error:
        return HandIn(file, _guess_name(file), problems=[f"cannot be read: {CARD}: {error}"])
    # An edited card may have any name; the page escapes it.
    with suppress(ParameterError):
        name = normalize_name(name)
    result = HandIn(file, name)
    for lab in dict.fromkeys(map(str, labs)):
        for read in (_read_run, _read_check):
            try:
                read(result, lab, members)
            except Exception as error:  # rows may be anything
                result.problems.append(f"{lab}: cannot be read: {error}")
    n_bytes = 0
    for path, member in members.items():
        if not path.endswith(".ipynb"):
            continue
        # Zeros are packed a thousandfold: one zip must not keep the others waiting.
        if n_bytes > 4 * MAX_BYTES:
            result.problems.append("too many MiB of notebooks: the others were not read")
            break
        try:
            content = member.read()
            n_bytes += len(content)
            result.notebooks[path] = _read_cells(content)
        except Exception as error:
            result.problems.append(f"{path}: cannot be read: {error}")
    return result


def _read_run(hand_in: HandIn, lab: str, members: Mapping[str, Member]) -> None:
    member = members.get(f"{lab}/run.jsonl")
    if member is None:
        return
    # A run is read from a file, and this one may lie in a zip.
    with TemporaryDirectory(prefix="labkit-hand-in-") as folder:
        copy = Path(folder) / "run.jsonl"
        copy.write_bytes(member.read())
        try:
            run = Run.load(copy)
        except ParameterError as error:
            raise ValueError(str(error).replace(str(copy), "run.jsonl")) from None
    if lab not in LABS or run.header.lab != lab:
        # Graded by the lab that the student claims, it would have no answers.
        raise ValueError(f"a run of {run.header.lab}, named {lab}")
    hand_in.runs[lab] = run


def _read_check(hand_in: HandIn, lab: str, members: Mapping[str, Member]) -> None:
    member = members.get(f"{lab}/check.json")
    if member is not None:
        record = _read_object(member.read())
        names = ("verdict", "details", "code", "checked")
        # Fields that a page shows, at a length that it can show.
        hand_in.checks[lab] = {name: str(record.get(name, ""))[:20_000] for name in names}


def _read_object(content: bytes) -> dict[str, Any]:
    result = json.loads(content.decode("utf-8-sig"))
    if not isinstance(result, dict):
        raise ValueError(f"expected an object, it is a {type(result).__name__}")
    return result


def _read_cells(content: bytes) -> list[tuple[str, str]]:
    cells = _read_object(content).get("cells")
    if not isinstance(cells, list):
        raise ValueError("a notebook without a list of cells")
    pairs = list[tuple[str, str]]()
    for cell in cells:
        if isinstance(cell, dict):
            source = cell.get("source", "")
            if isinstance(source, list):
                source = "".join(map(str, source))
            pairs.append((str(cell.get("cell_type")), str(source)))
    return pairs
