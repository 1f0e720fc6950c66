"""One look for all figures: drawn once with matplotlib, used as PNG files and as SVG that follows light and dark pages.

Every colour of `Palette` is unique, so that a drawn SVG can be re-coloured by replacing it with a CSS variable of the
same name.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Palette:
    """Colours of figures and page, in the light version; the page's CSS holds the dark one under the same names."""

    ink: str = "#1d2433"
    muted: str = "#6b7385"
    line: str = "#d5dae3"
    paper: str = "#fffefb"
    computed: str = "#eef1f5"
    cached: str = "#0b7a6f"
    second: str = "#8a5cd1"
    third: str = "#d9622b"
    turn: str = "#f7e3b8"
    floor: str = "#e4e7ee"


PALETTE = Palette()
REPLAY_MAP = (PALETTE.computed, "#b9ddd8", "#5fb3a9", "#0f7f74", "#07534c")  # nothing to everything replayed
NINES_MAP = ("#f3efe6", "#f0d29a", "#d99a6c", "#a3647a", "#5b4a86", "#26346e")  # cosine 0 to 0.99999


def colormap(stops: tuple[str, ...]) -> Any:
    """A continuous colour map through `stops`."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("rollcache", stops)


@contextmanager
def drawing() -> Iterator[type[Figure]]:
    """The figure class of matplotlib, without pyplot, under our settings."""
    import matplotlib

    settings: Any = {
        "font.family": "sans-serif",
        "font.size": 9.5,
        "axes.facecolor": "none",
        "axes.edgecolor": PALETTE.line,
        "axes.labelcolor": PALETTE.muted,
        "axes.titlecolor": PALETTE.ink,
        "axes.titlesize": 10,
        "axes.titlelocation": "left",
        "axes.linewidth": 0.8,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "xtick.color": PALETTE.muted,
        "ytick.color": PALETTE.muted,
        "xtick.major.size": 3,
        "ytick.major.size": 3,
        "text.color": PALETTE.ink,
        "grid.color": PALETTE.line,
        "grid.linewidth": 0.6,
        "legend.frameon": False,
        "svg.fonttype": "none",
        "svg.hashsalt": "rollcache",
    }
    with matplotlib.rc_context(settings):
        from matplotlib.figure import Figure

        yield Figure


def png(figure: Figure, dpi: int = 160) -> bytes:
    """The figure as PNG on the light page colour."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi, facecolor=PALETTE.paper)
    return buffer.getvalue()


def svg(figure: Figure, name: str) -> str:
    """The figure as an inline SVG element whose colours are CSS variables `--ink`, `--muted`, ...

    Args:
        figure: what to draw.
        name: makes the ids inside unique on a page; they are numbered, since matplotlib's differ from run to run.
    """
    buffer = io.StringIO()
    with drawing():  # how text is written is decided when the file is
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text))
    numbers = {old: f"{name}-{i}" for i, old in enumerate(dict.fromkeys(re.findall(r'id="([^"]+)"', text)))}
    text = re.sub(r'(id="|href="#|url\(#)([^")]+)', lambda m: m[1] + numbers.get(m[2], m[2]), text)
    text = re.sub(r"<[^>]+>", lambda tag: re.sub(r"\d+\.\d{3,}", lambda m: f"{float(m[0]):.2f}", tag[0]), text)
    for field in fields(Palette):
        text = text.replace(getattr(PALETTE, field.name), f"var(--{field.name})")
    text = re.sub(r" font-family: [^;\"]*;?", "", text)  # that of the page
    return text.strip()


def quiet(axes: Axes, *, left: bool = True, bottom: bool = True) -> None:
    """Take away the spines and ticks that say nothing."""
    axes.spines["left"].set_visible(left)
    axes.spines["bottom"].set_visible(bottom)
    axes.tick_params(left=left, bottom=bottom)


def templates() -> Any:
    """The jinja2 environment of the pages in this folder."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    return Environment(
        loader=PackageLoader("rollcache.bench.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
