"""Whatever ends a run, what was measured is kept and shown, and the result file says what is true."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import rollcache.bench.compare
import rollcache.bench.report
import rollcache.bench.results
from rollcache.cli import main

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


@pytest.fixture
def command(street_weights: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """A short comparison that writes into tmp_path / "run"; the chunked protocol times it after one chunk."""

    def words(*more: str) -> list[str]:
        fixed = f"compare --weights {street_weights} --protocol chunked --chunks 2 --steps 1 --dtype float32"
        return [*fixed.split(), "--out", str(tmp_path / "run"), *more]

    return words


def _read(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return found


def _interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_ctrl_c_while_measuring_keeps_times_decisions_and_latents(
    command: Any, tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(rollcache.bench.compare, "fidelity", _interrupt)
    assert main(command()) == 130
    said, folder = capsys.readouterr(), tmp_path / "run"
    document = _read(folder)
    known = document["generated"]["u-turn"]
    assert document["status"] == "partial" and document["scenarios"] == {}
    assert known["timing"]["speedup"] > 0 and len(known["decisions"]["chunks"]) == 2
    latents = load_file(folder / known["latents"])
    assert latents.keys() == {"full", "xcache", "perturbed"} and latents["full"].shape[0] == 2 * 4
    assert f"u-turn: {known['timing']['speedup']:.2f}x" in said.out and "fidelity was not measured" in said.out
    assert f"partial results kept in {folder / 'results.json'}: u-turn (2 chunks, generated but not" in said.err
    assert "latents in u-turn-latents.safetensors" in said.err


def test_ctrl_c_while_controls_are_measured_keeps_the_rest(
    command: Any, tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(rollcache.bench.compare, "_control", _interrupt)
    assert main(command("--controls")) == 130
    said = capsys.readouterr().err
    document, page = _read(tmp_path / "run"), (tmp_path / "run" / "report.html").read_text()
    result = document["scenarios"]["u-turn"]
    assert document["status"] == "partial" and result["interrupted"]
    assert result["psnr"] > 0 and set(result["floor"]) == {"perturbed"} and result["controls"] == []
    assert result["unmeasured"][-1] == "similarity profile" and len(result["unmeasured"]) == 3
    assert "u-turn (2 chunks, without " in said
    assert "u-turn was interrupted." in page


@pytest.mark.parametrize(
    ("what", "status"),
    [("media", "measured, videos unfinished"), ("write_report", "measured, report unfinished")],
)
def test_ctrl_c_after_measuring_is_in_the_status(
    what: str, status: str, command: Any, tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    seen: list[str] = []

    def stop(*_: object) -> None:
        seen.append(_read(tmp_path / "run")["status"])
        raise KeyboardInterrupt

    monkeypatch.setattr(rollcache.bench.report, what, stop)
    assert main(command("--no-floor")) == 130
    left = "videos and report" if what == "media" else "report"
    assert seen == [f"measured, {left} unfinished"]
    assert _read(tmp_path / "run")["status"] == status
    assert f"results kept in {tmp_path / 'run' / 'results.json'}: u-turn; {status.split(', ')[1]}" in (
        capsys.readouterr().err
    )
    monkeypatch.undo()
    if what == "write_report":
        assert main(["report", str(tmp_path / "run")]) == 0
        assert _read(tmp_path / "run")["status"] == "complete"


def test_ctrl_c_while_the_file_is_written_does_not_lose_it(
    command: Any, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    real, count = rollcache.bench.results.write_atomic, 0

    def stop_once(path: Path, content: str) -> Path:
        nonlocal count
        count += 1
        if count == 2:  # the first writing is that of the empty file
            raise KeyboardInterrupt
        return real(path, content)

    monkeypatch.setattr(rollcache.bench.results, "write_atomic", stop_once)
    assert main(command("--no-floor", "--no-report")) == 130
    assert "results kept in" in capsys.readouterr().err
    assert _read(tmp_path / "run")["scenarios"].keys() == {"u-turn"}


def test_full_disk_after_the_work_prints_the_table_first(
    command: Any, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    real, count = rollcache.bench.results.write_atomic, 0

    def full(path: Path, content: str) -> Path:
        nonlocal count
        count += 1
        if count > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return real(path, content)

    monkeypatch.setattr(rollcache.bench.results, "write_atomic", full)
    assert main(command("--no-floor")) == 2
    said = capsys.readouterr()
    assert "stitched" in said.out
    file = tmp_path / "run" / "results.json"
    assert said.err.splitlines()[-1] == f"error: {file}: No space left on device; the tables above have the numbers"
    assert _read(tmp_path / "run")["status"] == "partial"


def test_both_result_files_are_written_at_once(command: Any, tmp_path: Path, capsys: Capture) -> None:
    blocked = tmp_path / "run"
    blocked.write_text("mine")
    assert main(command("--json", str(tmp_path / "copy.json"))) == 2
    said = capsys.readouterr().err
    assert str(blocked) in said and "drawing" not in said
