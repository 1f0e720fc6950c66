"""The house: what the package asks pip for, what its wheel holds, and that documented commands exist."""

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from email import message_from_string
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
# Each of these brings torchvision in (or pins old versions), and with it a CUDA build of torch over the CPU one.
FORBIDDEN = {"torchvision", "lpips", "piq", "torchmetrics", "vbench", "torchaudio"}


@pytest.fixture(scope="module")
def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    code = "import sys, hatchling.build as build; print(build.build_wheel(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", code, folder], cwd=ROOT, check=True, capture_output=True, timeout=120)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as archive:
        yield archive


@pytest.fixture(scope="module")
def core(wheel):
    name = next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
    return message_from_string(wheel.read(name).decode())


def test_the_core_needs_torch_alone_and_keeps_an_installed_cpu_build(project):
    (torch,) = map(Requirement, project["dependencies"])
    assert torch.name == "torch"
    assert torch.specifier.contains("2.6.0")
    assert torch.specifier.contains("2.13.0+cpu")
    assert any(part.operator == "<" for part in torch.specifier), "without an upper bound pip may replace the CPU build"


def test_no_requirement_of_the_wheel_brings_torchvision(core):
    names = {canonicalize_name(Requirement(line).name) for line in core.get_all("Requires-Dist")}
    assert "torch" in names
    assert not names & FORBIDDEN
    assert not {canonicalize_name(extra) for extra in core.get_all("Provides-Extra")} & FORBIDDEN


def test_nothing_that_was_installed_for_us_asks_for_torchvision():
    pending, seen = ["rollcache"], set()
    while pending:
        name = canonicalize_name(pending.pop())
        if name in seen:
            continue
        seen.add(name)
        try:
            lines = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        for requirement in map(Requirement, lines):
            ours = name == "rollcache"  # all of our extras, none of other packages'
            if requirement.marker is None or ours or requirement.marker.evaluate({"extra": ""}):
                pending.append(requirement.name)
    assert {"torch", "numpy", "pytest"} <= seen
    assert not seen & FORBIDDEN


def test_wheel_metadata_is_what_an_index_shows(core, project):
    assert core["Name"] == "rollcache"
    assert core["Version"] == project["version"]
    assert core["Requires-Python"] == ">=3.11"
    assert core["License-Expression"] == "Apache-2.0 AND BSD-2-Clause"
    assert core.get_all("License-File") == ["LICENSE", "src/rollcache/measure/lpips_heads.NOTICE"]
    assert core["Description-Content-Type"] == "text/markdown"
    assert core["Summary"]


def test_wheel_holds_the_package_its_data_and_its_notices_and_nothing_else(wheel):
    names = wheel.namelist()
    for needed in ("py.typed", "measure/lpips_heads.safetensors", "measure/lpips_heads.NOTICE"):
        assert f"rollcache/{needed}" in names
    tracked = subprocess.run(["git", "ls-files", "src/rollcache"], cwd=ROOT, capture_output=True, text=True)
    for path in tracked.stdout.split():
        assert path.removeprefix("src/") in names, f"{path} is tracked, but not in the wheel"
    assert all(name.split("/")[0] == "rollcache" or ".dist-info/" in name for name in names)
    assert not [name for name in names if "__pycache__" in name or name.endswith((".pt", ".pth", ".csv.tmp"))]
    assert sum(info.file_size for info in wheel.infolist()) < 40e6


def test_licences_are_complete():
    text = (ROOT / "LICENSE").read_text("utf-8")
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text
    assert len(text.splitlines()) > 200
    notice = (ROOT / "src/rollcache/measure/lpips_heads.NOTICE").read_text("utf-8")
    assert "Copyright (c) 2018, Richard Zhang, Phillip Isola, Alexei A. Efros, Eli Shechtman, Oliver Wang" in notice
    assert "Redistributions in binary form must reproduce the above copyright" in notice


def test_importing_the_package_loads_torch_and_none_of_the_extras():
    heavy = [
        "panda3d",
        "av",
        "rich",
        "tyro",
        "jinja2",
        "matplotlib",
        "safetensors",
        "flip_evaluator",
        "rollcache.street",
    ]
    code = f"import rollcache.public, sys; print([m for m in {heavy!r} if m in sys.modules], 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] True"


def make(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run make as from a shell, whatever make runs these tests."""
    outer = {"MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "GNUMAKEFLAGS"}
    env = {key: value for key, value in os.environ.items() if key not in outer}
    return subprocess.run(["make", *words], cwd=ROOT, capture_output=True, text=True, check=check, env=env)


def targets() -> dict[str, str]:
    """Verbs of the Makefile and what `make help` says of them."""
    return dict(re.findall(r"^([a-z]+):.*?## (.+)$", (ROOT / "Makefile").read_text("utf-8"), re.M))


def test_every_verb_is_phony_and_listed_by_help():
    text = (ROOT / "Makefile").read_text("utf-8")
    phony = re.search(r"^\.PHONY: (.+)$", text, re.M)[1].split()
    assert sorted(phony) == sorted(targets())
    assert {"demo", "test", "lint", "types", "docs", "ablate", "clean", "help"} <= set(targets())
    shown = make("help").stdout
    for verb, what in targets().items():
        assert re.search(rf"make {verb}\s+{re.escape(what)}", shown)


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_make_commands_in_the_pages_exist(page):
    text = (ROOT / page).read_text("utf-8")
    named = set(re.findall(r"(?:^|`)make ([a-z]+)", text, re.M))
    assert named <= set(targets()), f"{page} names unknown verbs: {sorted(named - set(targets()))}"
    if page != "CHANGELOG.md":
        assert "test" in named


def test_a_fresh_make_test_installs_torch_first_and_a_second_one_nothing(tmp_path):
    def plan(*words):
        return make("-n", *words).stdout

    fresh = plan("test", f"VENV={tmp_path}/venv", "TORCH_SPEC=torch==2.9.0", "PIP_FLAGS=--no-cache-dir")
    order = [fresh.index(part) for part in ("-m venv", '"torch==2.9.0"', "check_torch", '".[test]"', "-m pytest")]
    assert order == sorted(order)
    assert "install --no-cache-dir" in fresh
    for stamp in (".python", ".torch", ".bench", ".test"):
        (tmp_path / stamp).touch()
    assert "pip" not in plan("test", f"VENV={tmp_path}")
    assert "pip" not in plan("demo", f"VENV={tmp_path}")
    stale = plan("demo", f"VENV={tmp_path}", "--what-if=pyproject.toml")
    assert '".[bench]"' in stale
    assert '"torch==' not in stale


def test_an_interrupted_install_leaves_no_stamp(tmp_path):
    """pip is replaced by a program that fails, as an interrupted one does."""
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text("#!/bin/sh\nexit 130\n")
    python.chmod(0o755)
    (tmp_path / ".python").touch()
    done = make("demo", f"VENV={tmp_path}", check=False)
    assert done.returncode != 0
    assert sorted(p.name for p in tmp_path.iterdir()) == [".python", "bin"]


def test_ci_runs_the_readmes_test_command():
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111, ".ci/run must be executable"
    text = script.read_text("utf-8")
    assert "set -euo pipefail" in text
    assert re.findall(r"^step (\w+)$", text, re.M) == ["lint", "types", "test"]
    subprocess.run(["bash", "-n", script], check=True)


def test_changelog_speaks_of_this_version(project):
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.M)[1]
    assert newest == project["version"]


def test_lock_files_are_not_committed():
    """A lock names package indexes and pins one machine's build of torch."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    assert not [path for path in tracked if Path(path).name in ("uv.lock", "poetry.lock", "pdm.lock", "Pipfile.lock")]
