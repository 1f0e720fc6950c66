"""The folder of a study: one small file a result, written whole or not at all, and locks by which processes share it.

study.json            what the study is: model, steps, windows
price.json            what a pass costs on this machine
match/KEY.json        the knob of a method at every target, and all that was tried
full/CLIP.safetensors latents of full compute
runs/CLIP/JOB.json    one method on one clip
report.md, *.png      tables and figures
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollcache.bench.results import dump
from rollcache.measure import write_atomic

try:
    import fcntl
except ImportError:  # not on Windows: there one process does it all
    fcntl = None  # type: ignore[assignment]

SCHEMA = "rollcache/steps-1"


class StudyError(ValueError):
    """A folder that belongs to another study, or holds a file that cannot be read."""


@dataclass(frozen=True)
class Folder:
    """Where everything of a study is kept."""

    path: Path

    def read(self, name: str) -> dict[str, Any] | None:
        """A JSON file of the folder, or None.

        Raises:
            StudyError: it is there and no JSON of this version.
        """
        path = self.path / name
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise StudyError(f"{path} cannot be read ({error}); remove it and run again.") from None
        if not isinstance(document, dict) or document.get("schema") != SCHEMA:
            raise StudyError(f"{path} is no file of this version; use another folder.")
        return document

    def write(self, name: str, document: Mapping[str, Any]) -> dict[str, Any]:
        """Write a JSON file whole; returns it as a reader will see it.

        Raises:
            WriteError: it could not be written.
        """
        text = dump({"schema": SCHEMA, **document})
        write_atomic(self.path / name, text)
        found: dict[str, Any] = json.loads(text)
        return found

    def claim_study(self, identity: Mapping[str, Any], **notes: Any) -> None:
        """Note what the study is, and `notes` beside it, or fail when the folder holds another one.

        Raises:
            StudyError: it names what differs.
        """
        known = self.read("study.json")
        wanted = json.loads(dump(identity))
        if known is None:
            self.write("study.json", {**identity, **notes})
            return
        for name, value in wanted.items():
            if known.get(name) != value:
                raise StudyError(
                    f"{self.path} holds a study with {name} {known.get(name)!r}, not {value!r}; use another --out."
                )

    def results(self) -> list[dict[str, Any]]:
        """All results so far, in the order of their names."""
        names = sorted(p.relative_to(self.path).as_posix() for p in self.path.glob("runs/*/*.json"))
        found = (self.read(name) for name in names)
        return [r for r in found if r is not None]

    def matches(self) -> dict[str, dict[str, Any]]:
        """All matches so far by the key of their method."""
        found = {p.stem: self.read(f"match/{p.name}") for p in sorted(self.path.glob("match/*.json"))}
        return {key: match for key, match in found.items() if match is not None}

    @contextmanager
    def lock(self, name: str, *, wait: bool = False) -> Iterator[bool]:
        """Hold a piece of work; yields False when another process does it and `wait` is off.

        The lock goes with the process: nothing is left locked by one that was killed.
        """
        if fcntl is None:
            yield True
            return
        path = self.path / "locks" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                yield False
                return
            yield True
