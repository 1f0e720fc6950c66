"""The result file: one JSON document that grows scenario by scenario and is whole on disk at any time.

`report` and readers need nothing else; videos lie beside it and are named in it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollcache.measure import write_atomic
from rollcache.measure.provenance import plain

SCHEMA = "rollcache/results-1"


class ResultsError(ValueError):
    """A result file that cannot be read."""


@dataclass
class Results:
    """Results of one command.

    Attributes:
        kind: the command that made them: "demo", "compare", "ablate", "profile" or "inject".
        provenance: see `measure.provenance`.
        planned: scenarios that were asked for.
        scenarios: finished (or interrupted) ones by name.
        path: the file.
        folder: where media go; None when only the JSON file is wanted.
    """

    kind: str
    provenance: Mapping[str, Any]
    planned: tuple[str, ...]
    path: Path
    folder: Path | None = None
    scenarios: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """All planned scenarios ran to their end."""
        return set(self.planned) == set(self.scenarios) and not any(
            s.get("interrupted") for s in self.scenarios.values()
        )

    def to_dict(self) -> dict[str, Any]:
        """The document."""
        return {
            "schema": SCHEMA,
            "kind": self.kind,
            "status": "complete" if self.complete else "partial",
            "planned": list(self.planned),
            "scenarios": self.scenarios,
            **self.extra,
            "provenance": self.provenance,
        }

    def add(self, scenario: str, result: Mapping[str, Any]) -> None:
        """Keep one scenario's result and write the file."""
        self.scenarios[scenario] = dict(result)
        self.save()

    def save(self) -> Path:
        """Write the file; the earlier version stays whole when that fails.

        Raises:
            WriteError: it could not be written.
        """
        return write_atomic(self.path, dump(self.to_dict()))


def dump(document: Any) -> str:
    """JSON with short numbers: seven significant digits are more than any measurement here has."""
    return json.dumps(_short(plain(document)), indent=1, allow_nan=False) + "\n"


def load_results(path: Path) -> dict[str, Any]:
    """Read a result file, or the `results.json` of a folder.

    Raises:
        ResultsError: not there, not JSON, or of another kind.
    """
    if path.is_dir():
        path = path / "results.json"
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ResultsError(
            f"no result file at {path}; make one with: rollcache demo, or rollcache compare --out DIR"
        ) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ResultsError(f"{path} is no readable result file ({error})") from None
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        found = document.get("schema") if isinstance(document, dict) else type(document).__name__
        raise ResultsError(f"{path} is no result file of this version: schema is {found!r}, not {SCHEMA!r}")
    return document


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.7g}")
    if isinstance(value, dict):
        return {k: _short(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_short(v) for v in value]
    return value
