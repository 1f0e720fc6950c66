"""Every example that a reader could copy works: Python blocks of the pages, docstring examples, command lines.

Python blocks of one file run in order, in one namespace, in an empty folder. A block right below a line
`<!-- no-run -->` is shown only. Command lines in bash blocks are checked against the help of the command.
"""

import ast
import contextlib
import doctest
import importlib
import io
import itertools
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^(?P<mark>`{3,}|~{3,})(?P<language>\w*)\s*$")
NO_RUN = "<!-- no-run -->"


@dataclass(frozen=True)
class Block:
    language: str
    line: int  # of its first line, from 1
    text: str
    run: bool


def blocks(text: str) -> list[Block]:
    """Fenced blocks of a Markdown page, in order."""
    found, mark, start, language, above, run = [], "", 0, "", "", True
    lines = text.splitlines()
    for number, line in enumerate(lines, start=1):
        if mark:
            if line.strip() == mark:
                found.append(Block(language, start + 1, "\n".join(lines[start : number - 1]) + "\n", run))
                mark = ""
        elif fence := FENCE.match(line):
            mark, language, start, run = fence["mark"], fence["language"], number, above != NO_RUN
        if line.strip():
            above = line.strip()
    assert not mark, f"the block that starts at line {start} is never closed"
    return found


def run_page(page: str, text: str, namespace: dict) -> int:
    """Run the Python blocks of a page; returns how many. Tracebacks point at lines of the page."""
    count = 0
    for block in blocks(text):
        if block.language != "python" or not block.run:
            continue
        count += 1
        if ">>>" in block.text:
            test = doctest.DocTestParser().get_doctest(block.text, namespace, page, page, block.line - 1)
            problems = io.StringIO()
            runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
            runner.run(test, out=problems.write, clear_globs=False)
            namespace.update(test.globs)
            assert not runner.failures, problems.getvalue()
        else:
            tree = ast.increment_lineno(ast.parse(block.text, page), block.line - 1)
            exec(compile(tree, page, "exec"), namespace)
    return count


def pages_with(language: str) -> list[Path]:
    return [p for p in PAGES if p.is_file() and any(b.language == language for b in blocks(p.read_text("utf-8")))]


def label(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", pages_with("python"), ids=label)
def test_python_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with contextlib.redirect_stdout(io.StringIO()):
        run_page(label(page), page.read_text("utf-8"), {"__name__": "__example__"})


def modules_with_examples() -> list[str]:
    source = ROOT / "src"
    files = [p for p in sorted((source / "rollcache").rglob("*.py")) if ">>>" in p.read_text("utf-8")]
    return [".".join(p.relative_to(source).with_suffix("").parts).removesuffix(".__init__") for p in files]


@pytest.mark.parametrize("name", modules_with_examples())
def test_docstring_examples_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    importlib.import_module(name)
    problems = io.StringIO()
    with contextlib.redirect_stdout(problems):
        result = doctest.testmod(sys.modules[name], optionflags=doctest.ELLIPSIS)
    assert result.attempted > 0, f"{name} has '>>>' in its text, but no docstring example"
    assert not result.failed, problems.getvalue()


@cache
def help_text(command: str) -> str:
    """Help of `rollcache` or of one of its commands ("" when there is no such command)."""
    program = Path(sys.executable).with_name("rollcache")
    done = subprocess.run(
        [program, *command.split(), "--help"],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "250", "NO_COLOR": "1"},
    )
    return done.stdout if done.returncode == 0 else ""


def command_lines(text: str) -> list[list[str]]:
    """The `rollcache ...` lines of the bash blocks of a page, as words."""
    found = []
    for block in blocks(text):
        if block.language in ("bash", "sh", "shell") and block.run:
            for line in block.text.replace("\\\n", " ").splitlines():
                words = shlex.split(line.removeprefix("$ "), comments=True)
                if words and words[0] == "rollcache":
                    found.append(words)
    return found


def command_of(words: list[str]) -> str:
    """The (sub)command of a `rollcache ...` line: the plain words before its options and files."""
    return " ".join(itertools.takewhile(re.compile(r"[a-z][a-z-]*").fullmatch, words[1:]))


def pages_with_commands() -> list[Path]:
    return [p for p in PAGES if p.is_file() and command_lines(p.read_text("utf-8"))]


@pytest.mark.parametrize("page", pages_with_commands(), ids=label)
def test_command_lines_name_commands_and_options_that_exist(page):
    for words in command_lines(page.read_text("utf-8")):
        text = help_text(command_of(words))
        assert text, f"no such command: {shlex.join(words)}"
        for option in (word.split("=")[0] for word in words if word.startswith("--")):
            assert re.search(rf"{re.escape(option)}(?![\w.-])", text), f"{option} of `{shlex.join(words)}` is unknown"


LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)")


@pytest.mark.parametrize("page", [p for p in PAGES if p.is_file()], ids=label)
def test_links_inside_the_repository_lead_somewhere(page):
    text = page.read_text("utf-8")
    for block in blocks(text):
        text = text.replace(block.text, "")
    broken = [link for link in LINK.findall(text) if not (page.parent / link).exists()]
    assert not broken, f"{label(page)} links to files that do not exist: {broken}"


def test_blocks_are_found_with_their_lines_and_marks():
    page = "a\n```python\nx = 1\n```\n\n<!-- no-run -->\n\n```python\nnope(\n```\n"
    page += "````text\n```python\n````\n```bash\nls\n```\n"
    assert blocks(page) == [
        Block("python", 3, "x = 1\n", True),
        Block("python", 9, "nope(\n", False),
        Block("text", 12, "```python\n", True),
        Block("bash", 15, "ls\n", True),
    ]
    with pytest.raises(AssertionError, match="line 1 is never closed"):
        blocks("```python\n")


def test_blocks_of_a_page_share_names_and_a_failing_one_fails():
    namespace: dict = {}
    page = "```python\nx = 2\n```\n```python\n>>> x + 1\n3\n>>> y = 5\n```\n```python\nz = y\n```\n"
    assert run_page("p", page, namespace) == 3
    assert namespace["z"] == 5
    with pytest.raises(ZeroDivisionError) as caught:
        run_page("p", "text\n\n```python\n\n1 / 0\n```\n", {})
    assert caught.traceback[-1].lineno + 1 == 5
    with pytest.raises(AssertionError, match="Expected"):
        run_page("p", "```python\n>>> 1 + 1\n3\n```\n", {})


def test_command_lines_are_read_with_continuations_and_comments():
    page = "```bash\n$ rollcache demo # quick\nmake test\nrollcache compare \\\n  --seed 0 --name='a b'\n```\n"
    assert command_lines(page) == [["rollcache", "demo"], ["rollcache", "compare", "--seed", "0", "--name=a b"]]
    assert command_of(["rollcache", "street", "train", "codec", "data/x", "y"]) == "street train codec"
    assert command_of(["rollcache", "--help"]) == ""
