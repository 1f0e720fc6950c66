"""From results to files: videos and figures of a scenario, and the page that holds all of it."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollcache.bench import tables
from rollcache.bench.report import figures as draw
from rollcache.bench.report.style import PALETTE, png, svg, templates
from rollcache.bench.report.video import GAIN, encode_mp4, panel_places, panels, picture
from rollcache.bench.results import dump
from rollcache.measure import mosaic, write_atomic
from rollcache.measure.fidelity import CONVENTION
from rollcache.measure.frames import STREET_ROWS
from rollcache.measure.provenance import plain
from rollcache.street.rig import FPS

if TYPE_CHECKING:
    from rollcache.bench.compare import Outcome

Result = Mapping[str, Any]

CAVEATS = (
    "A skip is one block evaluation of one denoise pass that was replaced by a stored residual. Commit passes are "
    "always exact and never enter the skip rate; they do enter the time.",
    "Time is the transformer's alone, gates, replays and commit passes included; decoding, metrics and video are not. "
    "Full compute and the cached runs take turns chunk by chunk in one process, on separate copies of the model.",
    "The ceiling assumes that skipped work, its gate and its replay cost nothing. Its block and pass times are those "
    "of the full-compute run beside it.",
    "All fidelity is against full compute with the same seed, noise, actions and protocol. It says nothing about how "
    "good the world model is: see its distance from the rendered truth.",
    "Videos on this page are compressed for watching; every number comes from the raw decoded frames.",
)


def media(outcome: Outcome, folder: Path, name: str) -> dict[str, Any]:
    """Write the videos and figures of one scenario into `folder`; returns their names and the places of the panels.

    Raises:
        WriteError: a file could not be written.
    """
    full, cached = outcome.full, outcome.cached
    height = mosaic(full).height
    video = f"{name}.mp4"
    write_atomic(folder / video, encode_mp4(panels(full, cached), FPS))
    singles = {}
    for key, frames in (("full", full), ("cached", cached), ("truth", outcome.truth)):
        singles[key] = f"{name}-{key}.mp4"
        write_atomic(folder / singles[key], encode_mp4(picture(frames), FPS))
    drawn = {}
    for key, figure in draw.figures(outcome.result).items():
        drawn[key] = f"{name}-{key}.png"
        write_atomic(folder / drawn[key], png(figure))
    return {"video": video, "panels": panel_places(height), "videos": singles, "figures": drawn}


def write_report(document: Result, folder: Path) -> Path:
    """Render `document` and write `report.html` into `folder`, where its videos lie.

    Raises:
        WriteError: the file could not be written.
    """
    return write_atomic(folder / "report.html", render(json.loads(dump(document)), folder))


def render(document: Result, folder: Path | None = None) -> str:
    """The page for a result document; videos are read from `folder` and embedded.

    Raises:
        ValueError: the document holds no scenario.
    """
    scenarios: Mapping[str, Result] = document["scenarios"]
    if not scenarios:
        raise ValueError("the result file holds no finished scenario, so there is nothing to report.")
    environment = templates()
    environment.filters |= {
        "number": tables.number,
        "percent": tables.percent,
        "pair": tables.psnr_pair,
        "times": tables.times,
    }
    first = next(iter(scenarios.values()))
    source = document["provenance"]
    return environment.get_template("page.html.j2").render(
        title=f"rollcache: {first['policy']['label']} on the street world",
        heading=f"{first['policy']['label']} beside full compute in a driving world",
        kind=document["kind"],
        version=source["versions"].get("rollcache", ""),
        date=source["time"][:16].replace("T", " ") + " UTC",
        lead=lead(scenarios),
        missing=missing(document),
        light=plain(PALETTE),
        scenarios=[_scenario(name, s, folder) for name, s in scenarios.items()],
        has_lpips=any(s["lpips"] is not None for s in scenarios.values()),
        notes=tables.notes(scenarios),
        variants=tables.variant_rows(scenarios),
        floors=tables.floor_rows(scenarios),
        tested=first["policy"]["label"],
        sheet={"left": draw.SHEET_LEFT, "right": draw.SHEET_RIGHT},
        protocol=first["protocol"]["text"],
        policy=_policy(first["policy"]),
        counted=first["counted"],
        convention=CONVENTION,
        provenance=source,
        machine=_machine(source["machine"]),
        versions=", ".join(f"{name} {version}" for name, version in source["versions"].items()),
        caveats=CAVEATS,
        settings=json.dumps(source["config"], indent=2),
    )


def missing(document: Result) -> str:
    """What partial results lack, in a sentence or more; empty when all was measured."""
    scenarios, generated = document["scenarios"], document.get("generated", {})
    cut = [name for name, s in scenarios.items() if s["interrupted"]]
    groups = (
        ([n for n in document["planned"] if n not in scenarios and n not in generated], "did not run."),
        (list(generated), "was generated, but not measured."),
        (cut, "was interrupted."),
    )
    return " ".join(f"{', '.join(names)} {what}" for names, what in groups if names)


def lead(scenarios: Mapping[str, Result]) -> str:
    """The result in one or two sentences."""
    first = next(iter(scenarios.values()))
    label = first["policy"]["label"]

    def span(key: str, digits: int, scale: float = 1.0) -> str:
        values = sorted(scale * s[key] for s in scenarios.values() if s[key] is not None)
        low, high = f"{values[0]:.{digits}f}", f"{values[-1]:.{digits}f}"
        return low if low == high else f"{low} to {high}"

    timed = any(s["speedup"] is not None for s in scenarios.values())
    fast = f"runs the transformer {span('speedup', 2)} times as fast" if timed else "ran too short for a speedup"
    text = (
        f"{label} skips {span('skip_rate', 0, 100)}% of the block evaluations and {fast}, "
        f"at {span('psnr', 1)} dB to full compute."
    )
    floors = [f["psnr"] for s in scenarios.values() for f in s["floor"].values()]
    if floors:
        low, high = f"{min(floors):.1f}", f"{max(floors):.1f}"
        text += f" Rounding alone, the numerical floor, is at {low if low == high else f'{low} to {high}'} dB."
    better: dict[str, list[str]] = {}
    for name, s in scenarios.items():
        for c in s["controls"]:
            if s["speedup"] is not None and c["speedup"] >= s["speedup"] and c["psnr"] >= s["psnr"] - 0.5:
                better.setdefault(c["label"], []).append(name)
    if better:
        which = ", ".join(f"{label} ({', '.join(names)})" for label, names in better.items())
        text += f" At least as fast, and as close within 0.5 dB: {which}."
    return text


def _scenario(name: str, result: Result, folder: Path | None) -> dict[str, Any]:
    """What the template shows of one scenario."""
    take, close, found = result["take"], result["fidelity"], result.get("media")
    video = None
    if folder is not None and found is not None and (folder / found["video"]).is_file():
        video = base64.b64encode((folder / found["video"]).read_bytes()).decode("ascii")
    frames = len(close["trace"])
    slug = "".join(c if c.isalnum() else "-" for c in name)
    inject = f", with {' and '.join(take['injections'])}" if take["injections"] else ""
    splits = [("turning", close["turning"]), ("straight", close["straight"])]
    splits += [(_phase(j, len(close["by_phase"])), row) for j, row in enumerate(close["by_phase"])]
    splits += [(f"cycle {row['cycle']}", row) for row in close["by_cycle"]]
    truth = result["truth"]
    drawn = {key: svg(figure, f"{slug}-{key}") for key, figure in draw.figures(result).items()}
    return {
        "name": name,
        "slug": slug,
        "r": result,
        "about": (
            f"Drive {take['drive']} ({_source(take['drive_source'])}) through scene {take['scene_seed']}, which was "
            f"never trained on{inject}: {take['start_frames']} real frames, then {frames} generated ones, "
            f"{frames / FPS:.1f} s at {FPS} frames a second, {len(result['decisions']['chunks'])} generation steps."
        ),
        "video": video,
        "panels": list(
            zip(
                found["panels"] if found else [],
                ("full compute", result["policy"]["label"], f"{GAIN:.0f} × difference"),
                ("every block of every pass", f"{tables.percent(result['skip_rate'])} skipped", "black: identical"),
                strict=False,
            )
        ),
        "seconds": frames / FPS,
        "figures": {"frontier": None, "cosine": None, **drawn},
        "caption": _sheet_caption(result),
        "skip_caption": _skip_caption(result),
        "cosine_caption": _cosine_caption(result),
        "splits": [(label, row) for label, row in splits if row],
        "truth_cycles": list(
            zip(
                range(len(truth["psnr_full_by_cycle"])),
                truth["psnr_full_by_cycle"],
                truth["psnr_cached_by_cycle"],
                strict=True,
            )
        ),
    }


def _phase(j: int, phases: int) -> str:
    return f"first in the cycle (j = {j}), exact" if j == 0 and phases > 1 else f"j = {j}"


def _source(source: str) -> str:
    return source if source in ("scripted", "constant") else f"recorded: {Path(source).name}"


def _sheet_caption(result: Result) -> str:
    moved = result["decisions"]["reasons"].get("the conditions moved", 0)
    upper, lower = (", ".join(row) for row in STREET_ROWS)
    text = (
        f"Cameras, upper row: {upper}; lower row: {lower}. The line in the plot follows the video; click to jump. "
        "Below the floor's band the cache costs fidelity, inside it the two runs differ by rounding. The first "
        "generation step of every cycle starts from new noise and is always computed"
    )
    return f"{text}; further pale columns are steps in which the action moved." if moved else f"{text}."


def _skip_caption(result: Result) -> str:
    phases = result["decisions"]["skip_by_phase"]
    by_phase = ", ".join(f"{100 * v:.0f}%" for v in phases)
    text = f"Block {_front(result)} computed in every pass." if _front(result) else "Every block may be skipped."
    return f"{text} By position in the KV cycle: {by_phase}." if len(phases) > 1 else text


def _front(result: Result) -> str:
    rates = result["decisions"]["skip_by_step_block"]
    never = [b for b in range(len(rates[0])) if not any(row[b] for row in rates)]
    return f"{never[0]} is" if never and len(never) < len(rates[0]) else ""


def _cosine_caption(result: Result) -> str:
    profile: Result | None = result["profile"]
    if profile is None:
        return ""
    changes = ", ".join(tables.number(v, 3) for v in profile["phase_residual_change"])
    return (
        "Full compute: how alike the input of a block is to that of the generation step before (smallest entry of the "
        f"fingerprint; mean over cycles). Relative change of the residuals by position in the cycle: {changes}. "
        f"{profile['verdict']}"
    )


def _policy(policy: Result) -> str:
    settings = policy["settings"]
    if not settings:
        return str(policy["label"])
    named = ", ".join(f"{k}={v}" for k, v in settings.items() if k != "type")
    return f"{settings['type']}({named})"


def _machine(machine: Result) -> str:
    parts = [machine["cpu"], f"{machine['cores']} cores, {machine['threads']} threads", machine["system"]]
    if "accelerator" in machine:
        parts.append(machine["accelerator"])
    return ", ".join(str(p) for p in parts)
