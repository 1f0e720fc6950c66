"""The page of an evaluation: one self-contained HTML file with the table and all figures.

It has the look of the benchmark report.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollcache.bench.report import world_figures as draw
from rollcache.bench.report.style import PALETTE, png, templates
from rollcache.measure import write_atomic
from rollcache.measure.fidelity import CONVENTION
from rollcache.measure.provenance import plain
from rollcache.street.evaluate.actions import BRAKE, TURN
from rollcache.street.evaluate.strips import moments, strip_path
from rollcache.street.evaluate.table import table
from rollcache.street.rig import FPS

CAPTIONS = {
    "horizon": (
        "Fidelity over the horizon",
        "Every window of 8 frames against the renderer's under the same actions, mean over cameras. Dotted: the last "
        "real frame held. Dash-dotted: what the codec alone reaches.",
    ),
    "cameras": ("Camera by camera", "PSNR of every window."),
    "stability": (
        "Does it stay a street?",
        "Statistics of the generated frames over those of the rendered ones. Sharpness is the energy of the luma's "
        "gradient. Flow is found by block matching (16 pixel blocks); 1 moves as rendered, 0 stands still.",
    ),
    "actions": (
        "Does it go where it is told?",
        "Speed and yaw rate read from the frames by a small net that was trained on rendered ones. Where it errs on "
        "rendered frames, too, the error is its own.",
    ),
    "agents": (
        "Are the agents where they should be?",
        "What the picture has inside the projected boxes, against a place in the same rows without an agent. "
        "Dash-dotted: the rendered frames after the codec.",
    ),
}
CAVEATS = (
    "The truth is one future. Far into the horizon a good world may show another one: PSNR then says little, and "
    "stability, action following and the agents say more.",
    f"A turn is a commanded yaw rate beyond {TURN:g} rad/s, a brake a deceleration beyond {BRAKE:g} m/s². Errors in "
    "percent are sums of absolute errors over sums of commanded values.",
    "The probe was trained on rendered frames. On a blurred or strange picture its error grows even where the motion "
    "is right.",
    "Agents that are far, small, mostly covered, or that the renderer's picture does not tell from their surroundings, "
    "are left out.",
    "The change found / commanded is read from two short rollouts with the same start and noise, one of them with "
    "other actions: 1 follows, 0 does not listen. The rendered truth is not needed for it.",
    "Student and teacher start from the same frames and noise; the teacher is compared over the first generation steps "
    "only.",
    "Time is the transformer's alone, measured in one process; whatever else runs on the machine is in it.",
)


def write_page(document: Mapping[str, Any], folder: Path) -> Path:
    """Render `document` and write `report.html` into `folder`, where its strips lie.

    Raises:
        WriteError: the file could not be written.
    """
    return write_atomic(folder / "report.html", render(document, folder))


def render(document: Mapping[str, Any], folder: Path | None = None) -> str:
    """The page for a document; strips are read from `folder` and embedded.

    Raises:
        ValueError: the document holds no scene.
    """
    scenes = document["scenes"]
    if not scenes:
        raise ValueError("the result file holds no finished scene, so there is nothing to report.")
    environment = templates()
    titles, rows = table(scenes)
    source, settings = document["provenance"], document["settings"]
    return environment.get_template("world_page.html.j2").render(
        version=source["versions"].get("rollcache", ""),
        date=source["time"][:16].replace("T", " ") + " UTC",
        light=plain(PALETTE),
        lead=lead(scenes),
        missing="" if document["status"] == "complete" else document["status"],
        titles=titles,
        rows=rows,
        figures=[(*CAPTIONS[name], _embedded(png(f, dpi=130))) for name, f in draw.figures(scenes).items()],
        strips=[found for s in scenes if (found := _strip(s, folder))],
        notes=sorted({n for s in scenes for n in s["parts"].get("horizon", {}).get("notes", ())}),
        protocol=settings["protocol"],
        weights=settings["weights"],
        machine=_machine(source["machine"]),
        versions=", ".join(f"{name} {version}" for name, version in source["versions"].items()),
        convention=CONVENTION,
        caveats=CAVEATS,
        provenance=source,
        settings=json.dumps(source["config"], indent=2),
    )


def lead(scenes: list[Mapping[str, Any]]) -> str:
    """The result in a sentence or two."""
    parts = [s["parts"]["horizon"] for s in scenes if "horizon" in s["parts"]]
    if not parts:
        return "Only the codec was measured."
    first, last = ([p["psnr"][i] for p in parts] for i in (0, -1))
    text = (
        f"The next window after real frames is at {_span(first)} dB to the renderer, the last one, after "
        f"{max(p['seconds'][-1] for p in parts):.0f} s, at {_span(last)} dB."
    )
    read = [s["parts"]["actions"] for s in scenes if "actions" in s["parts"]]
    turns = [r["generated"]["turn_percent"] for r in read if r["generated"]["turn_percent"] is not None]
    if turns:
        floor = [r["floor"]["turn_percent"] for r in read if r["floor"]["turn_percent"] is not None]
        text += (
            f" On turns the yaw rate read from generated frames is off by {_span(turns, 0)} % of the commanded one; "
            f"from rendered frames by {_span(floor, 0)} %."
        )
    found = [s["parts"]["agents"] for s in scenes if "agents" in s["parts"]]
    contrast = [a["contrast"] for a in found if a["contrast"] is not None]
    if contrast:
        text += (
            f" Agents stand out where they should with a contrast of {_span(contrast, 2)} (1 as rendered, 0 absent)."
        )
    return text


def _span(values: list[float], digits: int = 1) -> str:
    low, high = f"{min(values):.{digits}f}", f"{max(values):.{digits}f}"
    return low if low == high else f"{low} to {high}"


def _strip(scene: Mapping[str, Any], folder: Path | None) -> tuple[str, str, str] | None:
    """Title, moments and embedded picture of a scene's strip, if it is there."""
    path = None if folder is None else strip_path(folder, scene["name"])
    if path is None or not path.is_file() or "horizon" not in scene["parts"]:
        return None
    when = ", ".join(f"{(t + 1) / FPS:.3g}" for t in moments(scene["frames"]))
    return scene["name"], when, _embedded(path.read_bytes())


def _embedded(image: bytes) -> str:
    return base64.b64encode(image).decode("ascii")


def _machine(machine: Mapping[str, Any]) -> str:
    what = machine.get("accelerator") or machine["cpu"]
    return f"{what}, {machine['threads']} threads of {machine['cores']} cores, {machine['system']}"
