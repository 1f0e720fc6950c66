"""The command line. Only the chosen command's module is imported, so that help is quick."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

USER_ERROR, INTERRUPTED = 2, 130


@dataclass(frozen=True)
class Command:
    """Where a command's class is, and what it does in one line."""

    module: str
    name: str
    about: str


COMMANDS: dict[str, Any] = {
    "demo": Command("rollcache.bench.commands", "Demo", "seven cameras, three scenarios: full compute beside X-Cache"),
    "compare": Command("rollcache.bench.commands", "Compare", "one scenario, any policy, any knob, any drive"),
    "profile": Command("rollcache.bench.studies", "Profile", "will caching help? similarity, ceiling, numerical floor"),
    "ablate": Command("rollcache.bench.studies", "Ablate", "X-Cache's switches one by one, beside the paper's figures"),
    "inject": Command("rollcache.bench.studies", "Inject", "is a brake or a steer in the middle of a cycle followed?"),
    "steps": Command("rollcache.cli_steps", "Steps", "methods across denoising steps at matched speed, on the teacher"),
    "calibrate": Command("rollcache.cli_calibrate", "Calibrate", "where anchors belong, measured on the teacher"),
    "support": Command("rollcache.cli_support", "Support", "which models have an adapter, and which methods fit them"),
    "report": Command("rollcache.bench.commands", "Report", "make report.html again from a result file"),
    "street": {
        "info": Command("rollcache.cli_street", "Info", "what the weights are and how they were made"),
        "data": Command("rollcache.cli_street", "Data", "render training clips"),
        "train": {
            "codec": Command("rollcache.cli_street", "TrainCodec", "fit and train the video codec"),
            "teacher": Command("rollcache.cli_street", "TrainTeacher", "train the many-step transformer"),
            "student": Command("rollcache.cli_street", "TrainStudent", "distil it to four steps"),
            "probe": Command("rollcache.cli_street", "TrainProbe", "train what reads actions from frames"),
        },
        "pack": Command("rollcache.cli_street", "Pack", "make a weights file of the trained parts"),
        "eval": Command("rollcache.cli_street_eval", "Eval", "how good the world is, against the renderer"),
    },
}


GROUPS = {"street": "the embedded world", "train": "make its weights"}


class UsageError(ValueError):
    """The command line is wrong."""


def main(words: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code: 0, 2 after a user's error (one line on stderr), 130 after Ctrl-C."""
    words = list(sys.argv[1:] if words is None else words)
    warnings.showwarning = _warn
    try:
        return _run(words)
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except ImportError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in ("", "rollcache"):
            raise
        return _fail(f"error: {missing} is not installed; pip install 'rollcache[bench]'", USER_ERROR)
    except (ValueError, OSError) as error:
        if os.environ.get("ROLLCACHE_TRACEBACK"):
            raise
        return _fail(f"error: {_one_line(error)}", USER_ERROR)


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(overview())
        return 0
    if words[0] == "--version":
        from importlib.metadata import version

        print(f"rollcache {version('rollcache')}")
        return 0
    found: Any = COMMANDS
    path: list[str] = []
    while isinstance(found, dict):
        if not words or words[0] in ("-h", "--help"):
            if path:
                print(overview(" ".join(path), found))
            return 0 if words else USER_ERROR
        if words[0] not in found:
            raise UsageError(f"unknown command {' '.join([*path, words[0]])!r}; choose {', '.join(found)}")
        path.append(words[0])
        found = found[words.pop(0)]
    kind = getattr(importlib.import_module(found.module), found.name)
    command = parse(kind, words, f"rollcache {' '.join(path)}")
    return 0 if command is None else int(command.run())


def parse(kind: type[Any], words: Sequence[str], program: str) -> Any:
    """Read a command line into a command; None when help was asked for and printed.

    Raises:
        UsageError: it cannot be read; one sentence that names the culprit.
    """
    import tyro

    default = kind.default(words) if hasattr(kind, "default") else None
    extra = {} if default is None else {"default": default}
    noise = io.StringIO()
    try:
        with contextlib.redirect_stderr(noise):
            return tyro.cli(kind, args=list(words), prog=program, config=(tyro.conf.OmitArgPrefixes,)[:0], **extra)
    except SystemExit as leaving:
        if not leaving.code:
            return None
        raise UsageError(f"{_unbox(noise.getvalue())} (see {program} --help)") from None


def overview(prefix: str = "", commands: Any = COMMANDS) -> str:
    """The list of commands."""
    words = f"rollcache {prefix}".strip()
    lines = [f"usage: {words} COMMAND [OPTIONS]", ""]
    if not prefix:
        lines += ["Cross-chunk caching for autoregressive video diffusion world models.", ""]
    for name, command in commands.items():
        about = command.about if isinstance(command, Command) else f"{GROUPS[name]}: {', '.join(command)}"
        lines.append(f"  {name:<9} {about}")
    lines += ["", f"{words} COMMAND --help tells more." + ("" if prefix else " rollcache --version tells the version.")]
    return "\n".join(lines)


def _unbox(text: str) -> str:
    """The first paragraph of tyro's boxed message as one line, with its suggestions."""
    paragraphs: list[list[str]] = [[]]
    for line in text.splitlines():
        body = line.strip("│| ").strip()
        if line[:1] in "╭╰+" or not body:
            continue
        if not body.strip("─-"):
            paragraphs.append([])
        else:
            paragraphs[-1].append(body)
    if text[:1] not in "╭+" and len(paragraphs) > 1:
        del paragraphs[0]  # without a frame the title is a paragraph of its own
    said = " ".join(paragraphs[0]).rstrip(".")
    near = [line for p in paragraphs[1:] if p and p[0].startswith("Perhaps") for line in p]
    close = [line.split(" ")[0].rstrip(",") for line in near if line.startswith("--")]
    return f"{said}; did you mean {' or '.join(close)}?" if close else said or "cannot read the command line"


def _one_line(error: BaseException) -> str:
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return " ".join(text.split()) or type(error).__name__


def _fail(line: str, code: int) -> int:
    print(line, file=sys.stderr)
    return code


def _warn(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"warning: {' '.join(str(message).split())}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
