"""The folder of a calibration: calibration.json, figures as PNG, and report.md, which explains both."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rollcache.bench.calibrate.checks import FEWER
from rollcache.bench.calibrate.errors import by_age
from rollcache.bench.calibrate.figures import figures
from rollcache.bench.calibrate.result import FILE, Calibration
from rollcache.bench.report.style import png
from rollcache.measure import write_atomic
from rollcache.policies.fsc import FSC

DPI = 110


def write(calibration: Calibration, folder: Path) -> None:
    """Write everything, the numbers first.

    Raises:
        WriteError: something could not be written.
    """
    calibration.dump(folder / FILE)
    names = []
    for name, figure in figures(calibration).items():
        write_atomic(folder / f"{name}.png", png(figure, DPI))
        names.append(name)
    write_atomic(folder / "report.md", report(calibration, names))


def report(calibration: Calibration, drawn: Sequence[str]) -> str:
    """The report, which shows the figures in `drawn`."""
    parts = [_head(calibration), _checks(calibration), _surrogate(calibration), _anchors(calibration)]
    parts += [_tables(calibration), _reuse(calibration), _risk(calibration), _bands(calibration)]
    parts.append(_influence(calibration))
    text = "\n".join(part for part in parts if part) + "\n"
    for name in ("checks", "10b-surrogate", "schedules", "1a-reuse-error", "3-6-risk", "5-bands", "10a-influence"):
        image = f"![{name}]({name}.png)\n" if name in drawn else ""
        text = text.replace(f"<<{name}>>\n", image)
    return text


def _head(c: Calibration) -> str:
    p = c.provenance
    machine = p.get("machine", {})
    return "\n".join(
        (
            "# Calibration across the steps of a chunk",
            "",
            f"{c.steps} steps, {c.sigmas[0]:g} to {c.sigmas[-1]:.3f} in sigma; clips: {', '.join(c.clips)}.",
            *((f"Command: `{p['command']}`",) if "command" in p else ()),
            *(
                (
                    f"Machine: {machine.get('cpu')}, {machine.get('cores')} cores, {machine.get('threads')} torch "
                    f"thread(s), {p.get('dtype')}; {p.get('time')}, revision {p.get('revision')}.",
                )
                if machine
                else ()
            ),
            f"`{FILE}` has all numbers; `Calibration.load` reads it. Schedules to use: family **{c.family}**.",
            "",
        )
    )


def _checks(c: Calibration) -> str:
    rows = c.diagnostics.get("checks")
    if not rows:
        return ""
    clips = list(dict.fromkeys(r["clip"] for r in rows))
    names = [*(f for f in c.schedules if any(r["how"] == f for r in rows)), FEWER]
    budgets = sorted({r["exact"] for r in rows})

    def cell(name: str, n: int) -> str:
        mine = [r for r in rows if r["how"] == name and r["exact"] == n]
        if not mine:
            return ""
        each = " / ".join(f"{r['psnr']:.1f}" for r in mine)
        return f"**{fmean(r['psnr'] for r in mine):.2f}** ({each})"

    return "\n".join(
        (
            "## Run to the end",
            "",
            f"PSNR to full compute in dB, mean (and each) of {', '.join(clips)}, which took no part in the measuring.",
            "",
            *_table(["exact steps", *names], ([str(n), *(cell(name, n) for name in names)] for n in budgets)),
            "",
            "<<checks>>",
        )
    )


def _surrogate(c: Calibration) -> str:
    found = c.diagnostics.get("surrogate")
    if not found:
        return ""
    lines = []
    for n in sorted(found, key=int):
        entry = found[n]
        for name in entry["order"]:
            predicted = entry["predicted"][name]
            lines.append([n, name, f"{entry['plain'][name]:.3f}", f"{entry['weighted'][name]:.4f}", _number(predicted)])
    return "\n".join(
        (
            "## Measured order",
            "",
            "J: sum of the local errors of the replayed steps; weighted by influence; and the predicted error of the "
            "clean latent, in which the errors of the gaps are added as vectors (family `drift`).",
            "",
            *_table(["exact", "schedule", "J", "J weighted", "predicted error"], lines),
            "",
            *_agreement(c),
            "<<10b-surrogate>>",
        )
    )


def _agreement(c: Calibration) -> list[str]:
    found = c.diagnostics.get("agreement", {})
    if all(v is None for v in found.values()):
        return []
    said = ", ".join(
        f"{name} {_number(found[key])}"
        for key, name in (("plain", "J"), ("weighted", "J weighted"), ("predicted", "predicted error"))
    )
    return [f"Spearman with the real error, among the schedules of one budget and clip (mean): {said}.", ""]


def headlines(c: Calibration) -> list[str]:
    """The measured order of every budget in one line: by runs to the end, or else by surrogate cost."""
    rows = c.diagnostics.get("checks", [])
    lines = []
    for n, entry in c.diagnostics.get("surrogate", {}).items():
        here = [r for r in rows if r["exact"] == int(n)]
        fared = {
            how: fmean(r["psnr"] for r in here if r["how"] == how) for how in dict.fromkeys(r["how"] for r in here)
        }
        ranked = sorted(fared, key=lambda how: -fared[how])
        by_runs = ", ".join(f"{how} {fared[how]:.2f} dB" for how in ranked)
        by_cost = ", ".join(f"{name} {entry['plain'][name]:.3f}" for name in entry["order"])
        lines.append(f"{n} exact steps: {by_runs}" if here else f"{n} exact steps by local errors: {by_cost}")
    return lines


def _anchors(c: Calibration) -> str:
    budgets = sorted(map(int, c.diagnostics.get("surrogate", {})))
    lines = [[str(n), " ".join(map(str, c.schedules[c.family][n]))] for n in budgets if n in c.schedules[c.family]]
    return "\n".join(
        ("## Proposed anchors", "", *_table(["exact steps", f"family {c.family}"], lines), "", "<<schedules>>")
    )


def _reuse(c: Calibration) -> str:
    found = c.diagnostics.get("reuse")
    if not found:
        return ""
    middle = found["median"]
    best = min(range(len(middle)), key=lambda i: middle[i])
    ages = [age for age in (1, 2, 3, 4, 6, 8, 12) if 2 * age < c.steps]
    lines = [[str(a), f"{by_age(c.replay, a):.4f}", f"{by_age(c.predict, a):.4f}"] for a in ages]
    return "\n".join(
        (
            "## Reuse error by step (FSC, figure 1a)",
            "",
            f"Median over blocks and clips: {middle[0]:.3f} at step 1, {middle[best]:.3f} at step {best + 1}, "
            f"{middle[-1]:.3f} at the last.",
            "",
            "<<1a-reuse-error>>",
            "What leaves the stack, when the last residual is replayed, and when a line over sigma goes through it and "
            "one that is twice as old (mean over the steps for which there are two):",
            "",
            *_table(["age", "replayed", "predicted"], lines),
            "",
        )
    )


def _risk(c: Calibration) -> str:
    found = c.diagnostics.get("oracle")
    if not found or not found["clips"]:
        return ""
    count = sum(len(clip["steps"]) for clip in found["clips"])
    within = ", ".join(f"{_number(v)} ({name})" for name, v in found["within"].items())
    return "\n".join(
        (
            "## Does the risk know the error? (FSC, figures 3 and 6)",
            "",
            f"{count} replayed steps under FSC's own anchors. Spearman {_number(found['spearman'])}; within a clip "
            f"{within}. ROC-AUC for E > {found['unsafe']:g}: {_number(found['auc'])}, with "
            f"{100 * found['unsafe_share']:.0f} % of the steps above it. The paper has 0.893, 0.909 to 0.972, 0.930.",
            "",
            "<<3-6-risk>>",
        )
    )


def _tables(c: Calibration) -> str:
    lines = []
    if len(c.risks) >= 4:
        found = FSC(steps=c.steps).recalibrated(c.risks)
        lines.append(
            f"FSC, `FSC(steps={c.steps}).recalibrated(calibration.risks)`: thresholds "
            f"{', '.join(f'{t:.3f}' for t in found.thresholds)}, at its risk_scale of {found.risk_scale:g}."
        )
    if c.magnitude_ratios is not None:
        low, high = min(c.magnitude_ratios[1:]), max(c.magnitude_ratios[1:])
        lines.append(
            f"MagCache, `MagCache(steps={c.steps}, ratios=calibration.magnitude_ratios)`: ratios {low:.3f} to "
            f"{high:.3f}."
        )
    return "\n".join(("## Settings of other methods", "", "\n\n".join(lines), "")) if lines else ""


def _bands(c: Calibration) -> str:
    found = c.diagnostics.get("ages")
    if not found:
        return ""
    r = found["ratio"]
    return "\n".join(
        (
            "## High and low frequencies (FSC, figure 5)",
            "",
            f"Error of the high band over that of the low band: {r[0]:.2f} at age 1, {r[-1]:.2f} at age {len(r)}. The "
            "paper has 2 to 2.5. Here the low band is the mean over 4 x 4 tokens.",
            "",
            "<<5-bands>>",
        )
    )


def _influence(c: Calibration) -> str:
    found = c.diagnostics.get("touches")
    if not found:
        return ""
    lines = []
    for i, step in enumerate(found["steps"]):
        clips = found["clips"]
        gain = median(k["gain"][i] for k in clips)
        harm = median(k["damage"][i] / k["error"][i] if k["error"][i] else 0.0 for k in clips)
        lines.append([str(step), f"{c.sigmas[step]:.3f}", f"{gain:.2f}", f"{harm:.2e}"])
    return "\n".join(
        (
            "## Influence of one replayed step (FSC, figure 10a)",
            "",
            *_table(["step", "sigma", "gain", "1 - SSIM per local error"], lines),
            "",
            "Medians over the clips. The gain is the latent's error at the end over that right after the step. The "
            "paper's influence (LPIPS per local error) falls 4 to 6 times along the trajectory.",
            "",
            "<<10a-influence>>",
        )
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def _number(value: Any) -> str:
    return "n/a" if value is None or value != value or value == float("inf") else f"{value:.3f}"
