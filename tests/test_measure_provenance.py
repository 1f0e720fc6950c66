"""Provenance is complete and plain; files are whole or untouched."""

import dataclasses
import enum
import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rollcache.measure import WriteError, provenance, write_atomic
from rollcache.measure.provenance import plain, revision


class Protect(enum.Enum):
    CHUNK = "chunk"


@dataclasses.dataclass
class Config:
    floor: float
    protect: Protect
    sizes: tuple[int, ...]
    out: Path


def test_everything_needed_to_repeat_is_there_and_is_json():
    config = Config(0.97, Protect.CHUNK, (1, 2), Path("runs") / "a")
    found = provenance(config, seed=3, dtype=torch.bfloat16, command=["/some/where/rollcache", "demo", "a b"])
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["config"] == {"floor": 0.97, "protect": "chunk", "sizes": [1, 2], "out": "runs/a"}
    assert found["command"] == "rollcache demo 'a b'"
    assert (found["seed"], found["dtype"]) == (3, "bfloat16")
    assert found["versions"]["torch"] == torch.__version__
    assert found["versions"]["rollcache"]
    assert found["machine"]["threads"] == torch.get_num_threads()
    assert found["machine"]["cpu"]


def test_plain_values():
    assert plain({"a": float("nan"), 2: {3, 1}, "t": torch.tensor([1.5])}) == {"a": None, "2": [1, 3], "t": [1.5]}
    assert plain([True, None, torch.float32, torch.device("cpu")]) == [True, None, "float32", "cpu"]
    with pytest.raises(TypeError, match="cannot write a object into a result file"):
        plain({"x": object()})


def test_revision_of_a_checkout_tells_changes(tmp_path):
    def git(*words):
        identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        subprocess.run(["git", "-C", tmp_path, *identity, *words], check=True, capture_output=True)

    assert revision(tmp_path) is None
    git("init")
    (tmp_path / "f").write_text("1")
    git("add", "f")
    git("commit", "-m", "x")
    clean = revision(tmp_path)
    assert clean is not None
    assert len(clean) == 40
    (tmp_path / "f").write_text("2")
    assert revision(tmp_path) == f"{clean}-dirty"


def test_write_makes_folders_and_replaces(tmp_path):
    path = tmp_path / "runs" / "a" / "results.json"
    assert write_atomic(path, "grün") == path
    assert path.read_text(encoding="utf-8") == "grün"
    path.chmod(0o600)
    write_atomic(str(path), b"\x00\x01")
    assert path.read_bytes() == b"\x00\x01"
    assert path.stat().st_mode & 0o777 == 0o600
    assert [p.name for p in path.parent.iterdir()] == ["results.json"]


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_a_full_disk_leaves_the_old_file_and_no_debris(tmp_path, monkeypatch, call):
    path = write_atomic(tmp_path / "results.json", "old")

    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if call == "write":
        real = open

        class Full:
            def __init__(self, handle, mode):
                self.file = real(handle, mode)

            def __enter__(self):
                return self

            def __exit__(self, *_):
                self.file.close()

            write = full

        monkeypatch.setattr("builtins.open", Full)
    else:
        monkeypatch.setattr(os, call, full)
    with pytest.raises(WriteError, match=r"no space left to write .*results\.json \(2\.0 MB\); the earlier") as caught:
        write_atomic(path, b"x" * 2_000_000)
    monkeypatch.undo()
    assert caught.value.errno == errno.ENOSPC
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["results.json"]


def test_ctrl_c_in_the_middle_leaves_the_old_file_and_no_debris(tmp_path, monkeypatch):
    path = write_atomic(tmp_path / "results.json", "old")

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["results.json"]


@pytest.mark.skipif(sys.platform == "win32", reason="file size limits are POSIX")
def test_a_file_size_limit_of_the_system_is_reported(tmp_path):
    code = (
        "import resource, sys; from rollcache.measure import write_atomic, WriteError\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        f"path = {str(tmp_path / 'big')!r}\n"
        "try: write_atomic(path, b'x' * 5000)\n"
        "except WriteError as error: print(error.strerror)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "cannot write" in done.stdout
    assert "no part of big was left behind" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_targets_that_cannot_be_files_are_named(tmp_path):
    with pytest.raises(WriteError, match="Is a directory"):
        write_atomic(tmp_path, "x")
    (tmp_path / "file").write_text("")
    with pytest.raises(WriteError, match="cannot write"):
        write_atomic(tmp_path / "file" / "below", "x")


def test_writing_follows_links_and_never_replaces_a_device_or_a_pipe(tmp_path: Path) -> None:
    target, link, pipe = tmp_path / "target.txt", tmp_path / "link.txt", tmp_path / "pipe"
    link.symlink_to(target)
    write_atomic(link, "text")
    assert link.is_symlink()
    assert target.read_text() == "text"
    os.mkfifo(pipe)
    with pytest.raises(WriteError, match="name a regular file"):
        write_atomic(pipe, "text")
    assert pipe.is_fifo()
