from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import av
import pytest
import torch
from street_doubles import noise_frames, random_world

from rollcache.bench.compare import Outcome, compare
from rollcache.bench.controls import cached_plan, floor_plans
from rollcache.bench.fidelity import Perceptual
from rollcache.bench.lanes import Plan
from rollcache.bench.report import media, render, write_report
from rollcache.bench.report.figures import nines
from rollcache.bench.report.video import GAP, encode_mp4, panel_places, panels
from rollcache.bench.results import Results, ResultsError, load_results
from rollcache.bench.takes import make_take
from rollcache.measure import FrameError, provenance
from rollcache.street.protocol import Protocol


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    world = random_world()
    take = make_take(world, "u-turn", chunks=5, draw=noise_frames)
    return compare(
        world,
        take,
        Protocol(),
        cached_plan("xcache"),
        controls=[Plan(key="frozen", label="frozen window", frozen=True), Plan(key="steps-1", label="1 step", steps=1)],
        floors=floor_plans("float32", other=False),
        perceptual=Perceptual(frames=1),
        reload=random_world,
    )


@pytest.fixture(scope="module")
def folder(outcome: Outcome, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a result file, its media and the report."""
    path = tmp_path_factory.mktemp("run")
    results = _results(path, ("u-turn",))
    results.add("u-turn", {**outcome.result, "media": media(outcome, path, "u-turn")})
    write_report(results.to_dict(), path)
    return path


def _results(folder: Path, planned: tuple[str, ...]) -> Results:
    return Results("demo", provenance({"chunks": 5}, seed=0), planned, folder / "results.json", folder)


def test_report_is_one_self_contained_file(folder: Path) -> None:
    page = (folder / "report.html").read_text()
    assert "data:video/mp4;base64," in page
    loads = re.findall(r'(?:src|href|data)="([^"]+)"', page)
    assert all(link.startswith(("data:", "#")) for link in loads)
    assert not re.search(r"url\((?!#)|@import|<link|<script src", page)


def test_ids_are_unique_and_every_reference_has_a_target(folder: Path) -> None:
    page = (folder / "report.html").read_text()
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    used = set(re.findall(r"url\(#([^)]+)\)", page)) | set(re.findall(r'href="#([^"]+)"', page))
    assert used and used <= set(ids)


def test_figures_follow_the_colours_of_the_page(folder: Path) -> None:
    page = (folder / "report.html").read_text()
    drawn = "".join(re.findall(r"<svg.*?</svg>", page, flags=re.S))
    assert drawn.count("var(--cached)") > 0
    assert "#0b7a6f" not in drawn


def test_numbers_in_figures_are_not_rounded(folder: Path, outcome: Outcome) -> None:
    mean = outcome.result["profile"]["phase_cosine"][1]
    assert mean > 0.995 and f"j = 1, mean {mean:.5f}".rstrip("0") in (folder / "report.html").read_text()


def test_report_shows_what_was_measured(folder: Path, outcome: Outcome) -> None:
    page = (folder / "report.html").read_text()
    for text in (f"{outcome.result['psnr_stitched']:.2f}", "frozen window", "1 step", "start moved", "receding:"):
        assert text in page
    assert "partial results" not in page


def test_report_is_made_again_from_files_alone(folder: Path) -> None:
    assert render(load_results(folder), folder) == (folder / "report.html").read_text()


def test_report_without_videos_still_renders(folder: Path) -> None:
    page = render(load_results(folder))
    assert "<video" not in page and "<svg" in page


def test_partial_results_say_so(outcome: Outcome, tmp_path: Path) -> None:
    results = _results(tmp_path, ("urban", "u-turn"))
    results.add("u-turn", {**outcome.result, "interrupted": True})
    document = load_results(tmp_path)
    assert document["status"] == "partial"
    page = render(document)
    assert "urban did not run." in page and "u-turn was interrupted." in page


def test_nothing_to_report(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no finished scenario"):
        render(_results(tmp_path, ("urban",)).to_dict())


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": "other"}'])
def test_broken_result_files(text: str, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text(text)
    with pytest.raises(ResultsError, match=re.escape(str(path))):
        load_results(path)


def test_missing_result_file(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match="no result file"):
        load_results(tmp_path)


def test_media_of_a_scenario(folder: Path, outcome: Outcome) -> None:
    found: dict[str, Any] = json.loads((folder / "results.json").read_text())["scenarios"]["u-turn"]["media"]
    for name in (found["video"], *found["videos"].values(), *found["figures"].values()):
        assert (folder / name).stat().st_size > 500
    with av.open(str(folder / found["video"])) as container:
        stream = container.streams.video[0]
        assert stream.codec_context.pix_fmt == "yuv420p" and stream.codec_context.name == "h264"
        assert float(stream.average_rate or 0) == 12
        assert sum(1 for _ in container.decode(stream)) == 10


def test_panels_show_the_difference_twenty_times_enlarged() -> None:
    full = {"front": torch.full((2, 1, 16, 20, 3), 0.5)}
    cached = {"front": full["front"] + 0.01}
    assert panels(full, cached, scale=3).shape == (2, 3 * (3 * 16 + 2 * GAP), 60, 3)
    picture = panels(full, cached, scale=1)
    assert picture.shape == (2, 3 * 16 + 2 * GAP, 20, 3)
    tops = [round(place * picture.shape[1]) for place in panel_places(16)]
    assert [int(picture[0, top, 0, 0]) for top in tops] == [128, 130, 51]


def test_video_survives_odd_sizes_and_keeps_its_picture() -> None:
    frames = torch.zeros(3, 27, 33, 3, dtype=torch.uint8)
    frames[:, :, 18:] = 255
    with av.open(io.BytesIO(encode_mp4(frames, 12))) as container:
        pictures = [torch.from_numpy(f.to_ndarray(format="rgb24")) for f in container.decode(video=0)]
    assert len(pictures) == 3
    assert pictures[0].shape == (28, 34, 3)
    assert pictures[1][:, :14].float().mean() < 20 and pictures[1][:, 24:].float().mean() > 235


def test_video_needs_bytes() -> None:
    with pytest.raises(FrameError, match="uint8"):
        encode_mp4(torch.zeros(2, 8, 8, 3), 12)


@pytest.mark.parametrize(("cosine", "expected"), [(0.9, 1), (0.999, 3), (1.0, 5), (-0.5, 0), (0.0, 0)])
def test_nines(cosine: float, expected: float) -> None:
    assert nines(cosine) == pytest.approx(expected)
