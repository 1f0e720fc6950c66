"""The result file: one JSON document that grows scenario by scenario and is whole on disk at any time.

`report` and readers need nothing else; videos lie beside it and are named in it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollcache.bench.schema import DOCUMENT, fault
from rollcache.measure import write_atomic
from rollcache.measure.provenance import plain

SCHEMA = "rollcache/results-1"
REPORTED = ("demo", "compare")  # the commands whose results have a report
AFTER_REPORT = {
    "measured, report unfinished": "complete",
    "measured, videos and report unfinished": "measured, videos unfinished",
}


class ResultsError(ValueError):
    """A result file that cannot be read."""


@dataclass
class Results:
    """Results of one command.

    Attributes:
        kind: the command that made them: "demo", "compare", "ablate", "profile" or "inject".
        provenance: see `measure.provenance`.
        planned: scenarios that were asked for.
        path: the file; None writes none.
        copies: further places of the same file.
        folder: where media go; None when only the JSON file is wanted.
        reports: whether videos, figures and the report in `folder` are part of the run.
        reported: the report is there.
        scenarios: finished (or interrupted) ones by name.
        generated: by name, what is known of scenarios that were generated and not measured.
        extra: further entries of the document.
    """

    kind: str
    provenance: Mapping[str, Any]
    planned: tuple[str, ...]
    path: Path | None
    folder: Path | None = None
    copies: tuple[Path, ...] = ()
    reports: bool = False
    reported: bool = False
    scenarios: dict[str, Any] = field(default_factory=dict)
    generated: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def measured(self) -> bool:
        """All planned scenarios ran to their end."""
        return set(self.planned) == set(self.scenarios) and not any(
            s.get("interrupted") for s in self.scenarios.values()
        )

    @property
    def unfinished(self) -> str:
        """What is still to be written beside the numbers, in words; empty when nothing is."""
        if not self.reports:
            return ""
        left = [] if all("media" in s for s in self.scenarios.values()) else ["videos"]
        return " and ".join([*left, *([] if self.reported else ["report"])])

    @property
    def status(self) -> str:
        """`complete`, `partial` when a scenario is not there or cut short, or what follows the measuring."""
        if not self.measured:
            return "partial"
        return f"measured, {self.unfinished} unfinished" if self.unfinished else "complete"

    def to_dict(self) -> dict[str, Any]:
        """The document."""
        return {
            "schema": SCHEMA,
            "kind": self.kind,
            "status": self.status,
            "planned": list(self.planned),
            "scenarios": self.scenarios,
            **({"generated": self.generated} if self.generated else {}),
            **self.extra,
            "provenance": self.provenance,
        }

    def add(self, scenario: str, result: Mapping[str, Any]) -> None:
        """Keep one scenario's result and write the file."""
        self.scenarios[scenario] = dict(result)
        self.save()

    def save(self) -> None:
        """Write the file; the earlier version stays whole when that fails.

        Raises:
            WriteError: it could not be written.
        """
        if self.path is not None:
            for path in (self.path, *self.copies):
                write_atomic(path, dump(self.to_dict()))


def dump(document: Any) -> str:
    """JSON with short numbers: seven significant digits are more than any measurement here has."""
    return json.dumps(_short(plain(document)), indent=1, allow_nan=False) + "\n"


def load_results(path: Path) -> dict[str, Any]:
    """Read a result file that has a report, or the `results.json` of a folder, and check all that the report shows.

    Raises:
        ResultsError: not there, not JSON, of another kind, or damaged; names the file and the place in it.
    """
    if path.is_dir():
        path = path / "results.json"
    try:
        document = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_number)
    except FileNotFoundError:
        raise ResultsError(
            f"no result file at {path}; make one with: rollcache demo, or rollcache compare --out DIR"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ResultsError(f"{path} is no readable result file ({error})") from None
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        found = document.get("schema") if isinstance(document, dict) else type(document).__name__
        raise ResultsError(f"{path} is no result file of this version: schema is {found!r}, not {SCHEMA!r}")
    if document.get("kind") not in REPORTED:
        raise ResultsError(f"{path} comes from rollcache {document.get('kind')}, which has no report.")
    if damage := fault(document, DOCUMENT) or _odd_frames(document["scenarios"]):
        raise ResultsError(f"{path} is damaged: {damage}. Run the command again that made it.")
    return document


@contextmanager
def fitting(path: Path) -> Iterator[None]:
    """Turn what goes wrong while a result file is shown into a `ResultsError`: its parts do not fit together."""
    from jinja2 import TemplateError

    try:
        yield
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, TemplateError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ResultsError(
            f"{path} is damaged: its parts do not fit together ({reason}). Run the command again that made it."
        ) from error


def mark_reported(path: Path, document: Mapping[str, Any]) -> None:
    """Bring the status of a result file up to date once its report is there."""
    status = AFTER_REPORT.get(document["status"])
    if status is not None:
        write_atomic(path, dump({**document, "status": status}))


def _odd_frames(scenarios: Mapping[str, Any]) -> str | None:
    """Frames that cannot be those of the chunks, which would be drawn wrongly rather than fail."""
    for name, s in scenarios.items():
        frames, chunks = len(s["fidelity"]["trace"]), len(s["decisions"]["chunks"])
        if not (frames and chunks) or frames % chunks:
            return f"scenarios.{name} has fidelity.trace of length {frames} for {chunks} chunks in decisions.chunks"
    return None


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is no number in JSON")


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.7g}")
    if isinstance(value, dict):
        return {k: _short(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_short(v) for v in value]
    return value
