"""A damaged result file gets one error that names the file and the place, whatever was damaged."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from street_doubles import noise_frames, random_world

from rollcache.bench.compare import compare
from rollcache.bench.controls import cached_plan, floor_plans
from rollcache.bench.fidelity import Perceptual
from rollcache.bench.lanes import Plan
from rollcache.bench.results import Results, ResultsError, load_results
from rollcache.bench.schema import DOCUMENT, Maybe, fault
from rollcache.bench.takes import make_take
from rollcache.cli import main
from rollcache.measure import provenance
from rollcache.street.protocol import Protocol

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A result file with a control, a floor and a profile, as read back."""
    world, protocol = random_world(), Protocol.named("chunked")
    outcome = compare(
        world,
        make_take(world, "u-turn", chunks=2, protocol=protocol, draw=noise_frames),
        protocol,
        cached_plan("xcache"),
        controls=[Plan(key="steps-1", label="1 step", steps=1)],
        floors=floor_plans("float32", other=False),
        perceptual=Perceptual(frames=1),
        reload=random_world,
    )
    path = tmp_path_factory.mktemp("run") / "results.json"
    Results("demo", provenance({"chunks": 2}, seed=0), ("u-turn",), path).add("u-turn", outcome.result)
    return load_results(path)


def _places(shape: Any, value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], bool]]:
    """Every place of a document that the shape speaks of, and whether it may be missing."""
    if isinstance(shape, Maybe):
        yield from _places(shape.shape, value, path) if value is not None else ()
    elif isinstance(shape, list):
        yield from _places(shape[0], value[0], (*path, 0)) if value else ()
    elif isinstance(shape, dict):
        for name, inner in shape.items():
            for key in list(value) if name == "*" else [name.removesuffix("?")]:
                if key in value:
                    yield (*path, key), name == "*" or name.endswith("?")
                    yield from _places(inner, value[key], (*path, key))


def _parent(document: dict[str, Any], path: tuple[Any, ...]) -> Any:
    found: Any = document
    for key in path[:-1]:
        found = found[key]
    return found


def test_every_missing_or_mistaken_entry_is_named(document: dict[str, Any]) -> None:
    assert fault(document, DOCUMENT) is None
    places = list(_places(DOCUMENT, document))
    assert len(places) > 80
    for path, optional in places:
        name = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).removeprefix(".")
        damaged = copy.deepcopy(document)
        if path[-1] != "config":  # all settings are shown as they are
            _parent(damaged, path)[path[-1]] = 5 if isinstance(_parent(document, path)[path[-1]], str) else "five"
            assert (fault(damaged, DOCUMENT) or "").startswith(f"{name} is a")
        if not optional:
            del _parent(damaged, path)[path[-1]]
            assert fault(damaged, DOCUMENT) == f"{name} is missing"


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("scenarios.u-turn.psnr", "high", "scenarios.u-turn.psnr is a text where a number belongs"),
        ("scenarios.u-turn.psnr", None, "scenarios.u-turn.psnr is null where a number belongs"),
        ("scenarios.u-turn.interrupted", 0, "scenarios.u-turn.interrupted is a whole number where true or false"),
        ("scenarios.u-turn.fidelity", [], "scenarios.u-turn.fidelity is a list where an object belongs"),
        ("scenarios", "none", "scenarios is a text where an object belongs"),
        ("provenance.versions", 3, "provenance.versions is a whole number where an object belongs"),
        ("scenarios.u-turn.decisions.chunks", [], "for 0 chunks in decisions.chunks"),
        ("scenarios.u-turn.fidelity.trace", [60.0], "fidelity.trace of length 1 for 2 chunks"),
        ("scenarios.u-turn.profile.cosine", [[]], "its parts do not fit together"),
        ("scenarios.u-turn.truth.psnr_full_by_cycle", [], "its parts do not fit together"),
        ("scenarios.u-turn.policy.label", "$\\frac{$", "its parts do not fit together"),
    ],
)
def test_report_of_a_damaged_file(
    path: str, value: Any, said: str, document: dict[str, Any], tmp_path: Path, capsys: Capture
) -> None:
    damaged, keys = copy.deepcopy(document), tuple(path.split("."))
    _parent(damaged, keys)[keys[-1]] = value
    file = tmp_path / "results.json"
    file.write_text(json.dumps(damaged))
    assert main(["report", str(tmp_path)]) == 2
    err = capsys.readouterr().err.splitlines()
    assert len(err) == 1 and err[0].startswith(f"error: {file} is damaged: ") and said in err[0]
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"schema": "rollcache/results-1", "kind": "de', "is no readable result file"),
        ('{"schema": "rollcache/results-1", "kind": NaN}', "NaN is no number in JSON"),
        ("[" * 100_000, "is no readable result file"),
        ('{"name": "package", "version": 1}', "is no result file of this version: schema is None"),
        ('{"schema": "rollcache/results-1"}', "comes from rollcache None, which has no report"),
        ('{"schema": "rollcache/results-1", "kind": ["demo"]}', "which has no report"),
        ('{"schema": "rollcache/results-1", "kind": "demo"}', "status is missing"),
    ],
)
def test_other_files(text: str, said: str, tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "other.json"
    file.write_text(text)
    assert main(["report", str(file)]) == 2
    assert f"error: {file} " in (line := capsys.readouterr().err) and said in line


def test_a_file_of_an_older_or_newer_version_is_read(document: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    file.write_text(json.dumps({**document, "later": 1}))
    assert load_results(file)["later"] == 1
    file.write_text(json.dumps({**document, "schema": "rollcache/results-9"}))
    with pytest.raises(ResultsError, match="results-9"):
        load_results(file)
