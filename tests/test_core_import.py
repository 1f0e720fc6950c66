"""`import rollcache` is light, and its rooms open when they are entered."""

from __future__ import annotations

import subprocess
import sys

import pytest

import rollcache


def modules_after(statement: str) -> set[str]:
    """Top-level modules that a fresh interpreter has loaded after a statement."""
    code = f"{statement}\nimport sys; print(' '.join({{m.split('.')[0] for m in sys.modules}}))"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def test_import_and_the_command_line_do_without_torch() -> None:
    assert "torch" not in modules_after("import rollcache.cli")


def test_the_first_name_loads_torch_and_nothing_torch_does_not_load() -> None:
    assert modules_after("import torch; from rollcache import XCache") - modules_after("import torch") == {"rollcache"}


def test_a_star_imports_the_public_names() -> None:
    names: dict[str, object] = {}
    exec("from rollcache import *", names)
    assert set(rollcache.__all__) <= set(names)
    assert names["XCache"] is rollcache.XCache


def test_import_does_not_load_the_world() -> None:
    code = "import sys; from rollcache import XCache; assert not [m for m in sys.modules if 'rollcache.street' in m]"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_rooms_are_attributes() -> None:
    assert rollcache.street.__name__ == "rollcache.street"
    assert {"street", "measure", "XCache"} <= set(dir(rollcache))
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = rollcache.nonsense


def test_every_public_name_exists() -> None:
    for name in rollcache.__all__:
        assert getattr(rollcache, name).__doc__
