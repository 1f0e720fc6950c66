"""Where a number comes from, and files that are either whole or not there.

`provenance` collects what a reader needs to repeat a measurement; `write_atomic` keeps the old file when the new one
cannot be written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import enum
import errno
import math
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

_EXTRAS = ("numpy", "safetensors", "panda3d", "av", "flip-evaluator")


class WriteError(OSError):
    """A file could not be written; the file that was there before, if any, is untouched."""


def provenance(
    config: object = None,
    *,
    seed: int | None = None,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    command: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Everything needed to repeat a measurement, as plain values.

    Args:
        config: The configuration: a dataclass or anything `plain` takes.
        seed: Seed of the rollout.
        dtype: Precision of the model; default torch's default dtype.
        device: Where the model ran.
        command: Command line; default that of this process, with the program's folder left out.
    """
    words = list(sys.argv if command is None else command)
    words[:1] = [Path(words[0]).name] if words else []
    return {
        "config": plain(config),
        "seed": seed,
        "command": shlex.join(words),
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        "revision": revision(),
        "machine": machine(device),
        "dtype": str(dtype or torch.get_default_dtype()).removeprefix("torch."),
    }


def versions() -> dict[str, str]:
    """Versions of Python, torch, this package and of the optional packages that are installed."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("rollcache", *_EXTRAS):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def revision(folder: Path | None = None) -> str | None:
    """Git revision of the source tree that this package runs from, `-dirty` appended when files changed.

    None when it runs from an installed wheel, or git is not there.
    """
    package = Path(__file__).resolve().parents[1]
    root = folder or package.parents[1]
    if not (root / ".git").exists() or (folder is None and package.parent.name != "src"):
        return None
    try:
        head = _git(root, "rev-parse", "HEAD")
        changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{head}-dirty" if changed else head


def machine(device: str | torch.device = "cpu") -> dict[str, Any]:
    """Processor, cores, threads, memory, system and, for CUDA, the accelerator."""
    where = torch.device(device)
    found: dict[str, Any] = {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "device": str(where),
    }
    with contextlib.suppress(ValueError, OSError, AttributeError):
        found["memory_gb"] = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1)
    if where.type == "cuda":
        found["accelerator"] = torch.cuda.get_device_name(where)
        found["cuda"] = torch.version.cuda
    return found


def plain(value: object) -> Any:
    """`value` as JSON takes it: dataclasses become mappings, enums their value, tuples lists, NaN and infinities None.

    Raises:
        TypeError: there is no plain form, as for an arbitrary object.
    """
    if value is None or (isinstance(value, bool | int | str) and not isinstance(value, enum.Enum)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, enum.Enum):
        return plain(value.value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, torch.dtype | torch.device):
        return str(value).removeprefix("torch.")
    if isinstance(value, torch.Tensor):
        return plain(value.tolist())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, Sequence | set | frozenset):
        return [plain(v) for v in (sorted(value, key=repr) if isinstance(value, set | frozenset) else value)]
    raise TypeError(f"cannot write a {type(value).__name__} into a result file; turn it into plain values first")


def write_atomic(path: str | os.PathLike[str], content: str | bytes) -> Path:
    """Write a file so that readers see the old one or the new one, never a part: temporary file, sync, rename.

    Missing folders are made, links followed; a device or a pipe is refused. On any failure, a full disk included, the
    temporary file is removed.

    Args:
        path: Where to write.
        content: Text (written as UTF-8) or bytes.

    Returns:
        The path written, links resolved.

    Raises:
        WriteError: the file could not be written, with the reason and, when it is space, how much is needed.
    """
    target = Path(path)
    if target.is_symlink():
        target = target.resolve()
    data = content.encode() if isinstance(content, str) else content
    temporary: str | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if target.exists() and not target.is_file():
            raise OSError(errno.EINVAL, "it is a device or a pipe, which would be replaced: name a regular file")
        handle, temporary = tempfile.mkstemp(prefix=f".{target.name[:100]}.", suffix=".part", dir=target.parent)
        with open(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, target.stat().st_mode & 0o7777 if target.exists() else 0o666 & ~_umask())
        os.replace(temporary, target)
        temporary = None
    except OSError as error:
        raise WriteError(error.errno, _why(error, target, len(data))) from error
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
    return target


def _why(error: OSError, target: Path, size: int) -> str:
    kept = f"the earlier {target.name} is intact" if target.is_file() else f"no part of {target.name} was left behind"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"no space left to write {target} ({size / 1e6:.1f} MB); {kept}; free some space and run again"
    return f"cannot write {target}: {error.strerror or error}; {kept}"


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _git(root: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.strip()


def _cpu_model() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
