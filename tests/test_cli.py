from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rollcache.cli import COMMANDS, main

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def fails(capsys: Capture, street_weights: Path):  # type: ignore[no-untyped-def]
    """Run a command line that must fail like a user's error; returns the line on standard error."""

    def run(*words: str, code: int = 2) -> str:
        assert main([str(w) for w in words]) == code
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1
        return lines[0]

    return run


def _csv(path: Path, rows: int = 40, **cells: str) -> Path:
    """A recorded drive; `cells` replaces the text of a column in row 20."""
    lines = ["t_s,speed_mps,accel_mps2,yaw_rate_rps"]
    for i in range(rows):
        row = {"t_s": f"{i / 12:.4f}", "speed_mps": "8.0", "accel_mps2": "0.0", "yaw_rate_rps": "0.01"}
        if i == 20:
            row |= cells
        lines.append(",".join(row.values()))
    path.write_text("\n".join(lines) + "\n")
    return path


def test_compare_writes_what_was_asked_for(street_weights: Path, tmp_path: Path, capsys: Capture) -> None:
    drive, out, copy = _csv(tmp_path / "drive.csv"), tmp_path / "run", tmp_path / "out.json"
    words = f"compare --weights {street_weights} --dtype float32 --scenario u-turn --actions {drive} --chunks 3"
    assert main([*words.split(), "--xcache.condition-tol", "0.2", "--json", str(copy), "--out", str(out)]) == 0
    document = json.loads(copy.read_text())
    result = document["scenarios"]["u-turn"]
    for key in (
        "skip_rate",
        "speedup",
        "ceiling",
        "efficiency",
        "psnr",
        "psnr_stitched",
        "ssim",
        "flip",
        "lpips",
        "motion_ratio",
        "gate_share",
    ):
        assert key in result
    assert document["status"] == "complete"
    assert result["policy"]["settings"]["condition_tol"] == 0.2
    assert result["take"]["drive_source"] == str(drive)
    assert document["provenance"]["seed"] == 0
    assert json.loads((out / "results.json").read_text())["scenarios"].keys() == {"u-turn"}
    assert "<video" in (out / "report.html").read_text()
    printed = capsys.readouterr().out
    assert "stitched" in printed and "ceiling" in printed
    assert main(["report", str(out), "--out", str(tmp_path / "again.html")]) == 0
    assert (tmp_path / "again.html").read_text() == (out / "report.html").read_text()


def test_demo_runs_scenarios_with_controls(street_weights: Path, tmp_path: Path) -> None:
    words = f"demo --weights {street_weights} --runs {tmp_path} --name quick --chunks 2 --scenarios highway"
    assert main([*words.split(), "--no-controls"]) == 0
    document = json.loads((tmp_path / "quick" / "results.json").read_text())
    assert document["status"] == "complete" and document["scenarios"].keys() == {"highway"}
    assert {p.name for p in (tmp_path / "quick").iterdir()} > {"report.html", "highway.mp4", "highway-score.png"}


@pytest.mark.parametrize("words", [["--help"], [], ["street"], ["street", "train", "--help"]])
def test_overviews(words: list[str], capsys: Capture) -> None:
    assert main(words) in (0, 2)
    assert "usage: rollcache" in capsys.readouterr().out


def test_every_command_has_help(capsys: Capture) -> None:
    def leaves(found: dict[str, object], path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
        out: list[tuple[str, ...]] = []
        for name, inner in found.items():
            out += leaves(inner, (*path, name)) if isinstance(inner, dict) else [(*path, name)]
        return out

    for words in leaves(COMMANDS):
        assert main([*words, "--help"]) == 0
        assert f"usage: rollcache {' '.join(words)}" in capsys.readouterr().out


def test_help_needs_no_benchmark_code() -> None:
    code = "import sys; from rollcache.cli import main; main(['--help']); print('rollcache.bench' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize(
    ("words", "culprit"),
    [
        ("dem", "unknown command 'dem'; choose demo, compare"),
        ("street trian", "unknown command 'street trian'"),
        ("compare --scenario moon", "'moon'"),
        ("compare --policy teacache", "'teacache'"),
        ("compare --protocol forcing", "'forcing'"),
        ("compare --xcache.min-cosine 1.5", "min_cosine must be in [-1, 1], got 1.5"),
        ("compare --xcache.min-cosine=-2", "min_cosine must be in [-1, 1], got -2.0"),
        ("compare --policy xcache-paper --xcache.margin -1", "margin"),
        ("compare --xcache.floor 0.9", "--xcache.floor"),
        ("compare --xcache.min-cosne 0.9", "did you mean --xcache.min-cosine"),
        ("compare --policy none --xcache.margin 0.1", "--xcache.margin has no effect with --policy none"),
        ("compare --window-reuse.condition-tol 0.1", "has no effect with --policy xcache"),
        ("compare --chunks many", "'many'"),
        ("report nowhere", "no result file at nowhere"),
        ("street train teacher --folder nowhere", "no codec in nowhere"),
        ("street info --weights nowhere.safetensors", "no weights at nowhere.safetensors"),
    ],
)
def test_bad_words_are_named(words: str, culprit: str, fails) -> None:  # type: ignore[no-untyped-def]
    assert culprit in fails(*words.split())


@pytest.mark.parametrize(
    ("cells", "culprit"),
    [
        ({"speed_mps": "fast"}, "line 22, column speed_mps: 'fast'"),
        ({"yaw_rate_rps": "nan"}, "line 22, column yaw_rate_rps"),
        ({"speed_mps": "60.0"}, "line 22, column speed_mps: jumps from 8 to 60"),
        ({"t_s": "9.0"}, "line 22, column t_s"),
        ({"t_s": "1,2"}, "line 22"),
    ],
)
def test_bad_drives_are_named(cells: dict[str, str], culprit: str, fails, street_weights: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    drive = _csv(tmp_path / "drive.csv", **cells)
    line = fails("compare", "--weights", street_weights, "--actions", drive, "--chunks", "3")
    assert f"{drive}" in line and culprit in line


@pytest.mark.parametrize(
    ("words", "culprit"),
    [
        ("compare --seed -1", "seed is -1"),
        ("compare --chunks 1", "chunks is 1"),
        ("compare --steps 0", "steps (0)"),
        ("compare --brake-at 9 --chunks 8", "cannot inject a brake at chunk 9"),
        ("compare --actions missing.csv", "missing.csv: No such file"),
        ("compare --lpips-weights missing.pth", "cannot read weights file missing.pth"),
        ("compare --lpips-weights alexnet-owt-00000000.pth", "is corrupt: its SHA-256"),
        ("compare --xcache.front-blocks 4", "front_blocks=4 and back_blocks=0 leave none of 4 blocks"),
        ("compare --policy xcache-paper --xcache.back-blocks 3", "leave none of 4 blocks"),
        ("compare --device nowhere", "--device nowhere"),
        ("compare --threads 0", "--threads is 0"),
        ("demo --seed -1", "seed is -1"),
        ("demo --chunks 1", "chunks is 1"),
        ("demo --threads 0", "--threads is 0"),
        ("profile --seed -1", "seed is -1"),
        ("profile --chunks 1", "chunks is 1"),
        ("ablate --chunks 1", "chunks is 1"),
        ("ablate --only everything", "no row 'everything'"),
        ("inject --at 3", "chunk 3 cannot be tested"),
        ("inject --kinds", "--kinds is empty"),
        ("inject --protocol chunked", "needs the receding protocol"),
    ],
)
def test_bad_input_is_reported_before_any_work(
    words: str,
    culprit: str,
    fails,  # type: ignore[no-untyped-def]
    street_weights: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from rollcache.bench.progress import Narrator
    from rollcache.bench.results import Results

    def work(*_: object) -> None:
        raise AssertionError("work has begun")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Narrator, "begin", work)
    monkeypatch.setattr(Results, "save", work)  # an earlier file must not be emptied either
    (tmp_path / "alexnet-owt-00000000.pth").write_bytes(b"mine")
    assert culprit in fails(*words.split(), "--weights", street_weights)


def test_a_drive_from_a_pipe_is_read_once(street_weights: Path, tmp_path: Path) -> None:
    pipe, drive = tmp_path / "drive.fifo", _csv(tmp_path / "drive.csv")
    os.mkfifo(pipe)
    threading.Thread(target=lambda: pipe.write_text(drive.read_text()), daemon=True).start()
    words = f"compare --weights {street_weights} --actions {pipe} --chunks 2 --steps 1 --no-floor --json {tmp_path}/o"
    assert main(words.split()) == 0


def test_short_and_missing_drives(fails, street_weights: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    drive = _csv(tmp_path / "drive.csv", rows=24)
    assert "24 rows" in fails("compare", "--weights", street_weights, "--actions", drive)
    missing = tmp_path / "missing.csv"
    assert f"{missing}: No such file" in fails("compare", "--weights", street_weights, "--actions", missing)


def test_damaged_weights(fails, street_weights: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / street_weights.name
    data = bytearray(street_weights.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    path.with_suffix(".sha256").write_text(street_weights.with_suffix(".sha256").read_text())
    line = fails("compare", "--weights", path)
    assert str(path) in line and "SHA-256" in line


def test_bad_path_fails_before_the_work(fails, street_weights: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    blocked = tmp_path / "file"
    blocked.write_text("mine")
    began = time.monotonic()
    line = fails("compare", "--weights", street_weights, "--json", blocked / "out.json")
    assert str(blocked) in line and time.monotonic() - began < 20
    assert blocked.read_text() == "mine"


def test_required_metric_without_weights(fails, street_weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    import torch

    monkeypatch.delenv("ROLLCACHE_LPIPS_WEIGHTS", raising=False)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: "/nonexistent")
    assert "--require lpips" in fails("compare", "--weights", street_weights, "--require", "lpips")


def test_full_disk_while_the_report_is_written(
    street_weights: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fsync

    def full(handle: int) -> None:
        if os.fstat(handle).st_size > 60_000:  # the videos and the page; results are smaller
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(handle)

    monkeypatch.setattr(os, "fsync", full)
    out = tmp_path / "run"
    drive = _csv(tmp_path / "drive.csv")
    words = f"compare --weights {street_weights} --actions {drive} --chunks 3 --out {out} --no-floor"
    assert main(words.split()) == 2
    said = capsys.readouterr()
    line = said.err.splitlines()[-1]
    assert line.startswith("error: no space left to write") and f"the numbers are in {out / 'results.json'}" in line
    assert "no part of u-turn.mp4 was left behind" in line and "stitched" in said.out
    document = json.loads((out / "results.json").read_text())
    assert document["status"] == "measured, videos and report unfinished"
    assert document["scenarios"].keys() == {"u-turn"}
    assert not list(out.glob("*.part"))


def test_ctrl_c_keeps_partial_results(street_weights: Path, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    words = ["compare", "--weights", street_weights, "--chunks", 60, "--steps", 16, "--json", path, "--no-floor"]
    process = subprocess.Popen(
        [sys.executable, "-m", "rollcache.cli", *map(str, words), "--threads", "1"],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a test run in the background ignores it
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "generating" in line:
            break
    time.sleep(5)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=200)[1]
    assert process.returncode == 130
    assert "Traceback" not in said
    document = json.loads(path.read_text())
    assert document["status"] == "partial"
    chunks = [len(s["decisions"]["chunks"]) for s in document["scenarios"].values()]
    if chunks:  # none on a machine that did not finish two chunks in five seconds
        assert 2 <= chunks[0] < 60 and f"partial results kept in {path}: u-turn ({chunks[0]} chunks)" in said
    else:
        assert "nothing was finished yet" in said


def test_ctrl_c_in_the_second_scenario_keeps_the_first(
    street_weights: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rollcache.bench.progress import Narrator

    begun: list[str] = []

    def stop(self: Narrator, n: int, lanes: object) -> None:
        if len(begun) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Narrator, "begin", lambda self, name, total: begun.append(name))
    monkeypatch.setattr(Narrator, "chunk", stop)
    words = f"demo --weights {street_weights} --runs {tmp_path} --chunks 2 --scenarios highway u-turn --no-controls"
    assert main(words.split()) == 130
    assert "partial results kept in" in capsys.readouterr().err
    document = json.loads((tmp_path / "demo" / "results.json").read_text())
    assert document["status"] == "partial" and document["scenarios"].keys() == {"highway"}
    page = (tmp_path / "demo" / "report.html").read_text()
    assert "These are partial results: u-turn did not run." in page
