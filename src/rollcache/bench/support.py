"""The support matrix as a Markdown page, made of the facts in `adapters/families.py`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rollcache.adapters.families import FAMILIES, MANY, METHODS, REFUSED, Family, Fit, Method, fit

SIGNS: dict[Fit, str] = {"good": "●", "limited": "○", "no": "–"}

KV = {
    "never": "none",
    "commit_only": "in passes of their own",
    "every_forward": "in every forward, the last one clean",
    "last_step": "in the last step",
}

HEAD = f"""# What works on which model

Made by `rollcache support --out docs/support.md`. A test holds this page against the code, and what it says about
methods against runs of small models of each family.

`rollcache.enable` knows these models by their exact class, or by name and structure where research code is copied from
repository to repository. Every other model: [A model of your own](own-model.md).

## Methods

{SIGNS["good"]} made for such a loop. {SIGNS["limited"]} runs, with little to find there: fewer than {MANY} steps, each
of them a large part of the way, or chunks that begin with noise of their own, so that inputs resemble each other at
late steps only. {SIGNS["no"]} raises, or leaves out nothing. None of it says that the quality is right: measure it.
"""

LOOPS = """## Loops

S are the denoising passes of a chunk in each branch, B the blocks. *Exact* are the passes of a chunk that are always
computed, in denoising passes. Repair of chosen tokens is *sparse* where they run alone, *refresh* where all run and the
chosen ones are kept, which saves nothing.
"""

CEILINGS = """## Ceilings

What may be left out of all block evaluations of a rollout, exact passes included, and what it would be worth if nothing
else took time. Across chunks: all blocks but the first, in every step of every chunk but the protected ones and those
of another shape than the one before. Across steps: all blocks in three steps of four. What a method does leave out
depends on the loop and the scene; a speedup beside its own ceiling is what `rollcache compare` and `rollcache steps`
print. How much of a ceiling each adapter reaches, on CPU-sized models with a schedule that is given:
[benchmarks/results/adapters](../benchmarks/results/adapters/report.md).
"""


def page() -> str:
    """The whole page."""
    parts = (HEAD, methods(), notes(), LOOPS, loops(), CEILINGS, ceilings(), "## Refused\n", refused())
    return "\n".join(parts)


def methods() -> str:
    """Families by groups of methods that ask the same of a model."""
    groups: dict[tuple[Any, ...], list[Method]] = {}
    for method in METHODS:
        groups.setdefault((method.across, method.needs, method.shared_noise), []).append(method)
    heads = [f"{', '.join(m.name for m in group)} (across {group[0].across})" for group in groups.values()]
    rows = [[_link(f), *(SIGNS[fit(f, group[0])[0]] for group in groups.values())] for f in FAMILIES]
    return table(["", *heads], rows)


def notes() -> str:
    """What cannot be seen in the table of methods."""
    said: dict[str, dict[str, list[str]]] = {}
    for method in METHODS:
        for family in FAMILIES:
            sign, why = fit(family, method)
            if sign == "no":
                said.setdefault(why, {}).setdefault(method.name, []).append(family.name)
    lines = [f"* {SIGNS['no']} {why}: {_and(list(methods))}." for why, methods in said.items()]
    announced = _and([f.name for f in FAMILIES if f.announced])
    return "\n".join(
        [
            *lines,
            f"* Across chunks, {announced} reuse inside `rollcache.adapters.loops.generation(...)` only.",
            '* FSC and MotionCache take `repairs="refresh"` where repair is not sparse, below.',
            '* `FSC(repairs="none")` needs no token grid.',
            "* MagCache needs a table that was measured on the model: `MagnitudeProbe`, `rollcache calibrate`.",
            "",
        ]
    )


def loops() -> str:
    """What a cache has to know about every family."""
    return table(
        ["", "class", "chunk", "S", "B", "K/V is written", "exact", "repair"],
        [
            [
                _link(f),
                f"`{f.model.removeprefix('diffusers: ')}`"
                + (" (diffusers)" if f.model.startswith("diffusers") else ""),
                f.chunk,
                str(f.steps),
                str(f.blocks),
                KV[f.adapter.kv_writes],
                f"{f.exact:g}" + (" and step 0" if f.first_pass_exact else ""),
                f.repair,
            ]
            for f in FAMILIES
        ],
    )


def ceilings() -> str:
    """What can be left out at most."""
    return table(
        ["", "across chunks", "ceiling", "across steps", "ceiling"],
        [[f.name, *_worth(f.across_chunks()), *_worth(f.across_steps())] for f in FAMILIES],
    )


def refused() -> str:
    """Models that `enable` refuses."""
    lines = [f"* {name}: {why}." for name, why in REFUSED.items()]
    return "\n".join([*lines, "", "The analysis is in [Models that are refused](backbones/refused.md).", ""])


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |".replace("|  |", "| |") for line in lines) + "\n"


def _link(family: Family) -> str:
    return f"[{family.name}]({family.page})"


def _and(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]


def _worth(share: float) -> tuple[str, str]:
    return f"{100 * share:.1f}%", f"{1 / (1 - share):.1f}x"
