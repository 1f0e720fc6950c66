"""docs/support.md says what the code says, and what it says of methods is seen in small models of every family."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from self_forcing_double import (
    CausalWanModel,
    CausVidLoop,
    CausVidModel,
    GameLoop,
    GameModel,
    KreaLoop,
    KreaModel,
    LongLive2Model,
    Loop,
)
from street_doubles import random_world
from test_benchmarks import script

import rollcache
from rollcache import RollcacheError
from rollcache.adapters.families import FAMILIES, METHODS, Family, Method, fit
from rollcache.adapters.registry import _BY_CLASS, _BY_STRUCTURE
from rollcache.adapters.rehearse import calls
from rollcache.bench.support import page
from rollcache.cli import main
from rollcache.decision import Stats
from rollcache.street.protocol import Protocol
from rollcache.street.world import Session, Start

DOCS = Path(__file__).parent.parent / "docs"
Play = Callable[[Any], Stats]


def test_the_page_is_what_the_command_writes(tmp_path: Path) -> None:
    assert main(["support", "--out", str(tmp_path / "support.md")]) == 0
    assert (tmp_path / "support.md").read_text("utf-8") == page() == (DOCS / "support.md").read_text("utf-8"), (
        "run: rollcache support --out docs/support.md"
    )


def test_it_prints_without_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["support"]) == 0
    assert "SkyReels-V2" in capsys.readouterr().out


def test_every_registered_model_and_every_method_is_in_it_and_every_page_exists() -> None:
    known = {name.rpartition(".")[2] for name in _BY_CLASS}
    known |= {s.class_name for s, source in _BY_STRUCTURE.items() if "refused" not in str(source)}
    assert known == {f.model for f in FAMILIES}
    methods = {name for name in rollcache.__all__ if hasattr(getattr(rollcache, name), "explain")}
    others = {"PolicyConfig", "Cache", "Stacked", "RiskProbe", "MagnitudeProbe"}
    assert {m.name for m in METHODS} == methods - others
    assert all((DOCS / f.page).is_file() for f in FAMILIES)


def test_ceilings_by_hand() -> None:
    by_name = {f.name: f for f in FAMILIES}
    assert by_name["LongLive 2"].across_chunks() == pytest.approx(3 * 29 / (5 * 30))
    assert by_name["SANA-WM refiner"].across_chunks() == pytest.approx(3 * 47 / (4 * 48))
    assert by_name["street, 4 steps"].across_chunks() == pytest.approx(3 / 4 * 4 * 11 / (4.25 * 12))
    assert by_name["SkyReels-V2 1.3B"].across_steps() == pytest.approx(37 / 50)
    assert by_name["CausVid"].across_steps() == pytest.approx(2 / 4)


def street(steps: int, kind: str) -> tuple[Play, int]:
    world = random_world()

    def play(policy: Any) -> Stats:
        with rollcache.enable(world.model, policy) as cache:
            start = Start(latents=torch.ones(8, 456, 24), action=torch.zeros(8, 4))
            session = Session(world, start, Protocol.named(kind, steps=steps), seed=0)
            for _ in range(8):
                session.step(torch.zeros(session.protocol.latents_per_chunk * 2, 2))
            return cache.stats()

    return play, steps


def wan(make: Callable[[], CausalWanModel], loop: Callable[..., Loop]) -> tuple[Play, int]:
    model = make()

    def play(policy: Any) -> Stats:
        with rollcache.enable(model, policy, adapter=family("CausVid").adapter) as cache:
            loop(model).run(4)
            return cache.stats()

    return play, len(loop(model).steps)


def of_diffusers(name: str) -> tuple[Play, int]:
    pytest.importorskip("transformers", reason="the pipelines of diffusers need it: pip install 'rollcache[diffusers]'")
    pytest.importorskip("diffusers", reason="the real classes are needed: pip install 'rollcache[diffusers]'")
    bench = sys.modules.get("adapters") or script("adapters")
    scale = bench.Scale(depth=3, heads=2, head=16, frames=(2, 2, 2), cells=(2, 2), steps=4)
    made = bench.FAMILIES[name](scale)

    def play(policy: Any) -> Stats:
        with rollcache.enable(made.model, policy, adapter=made.adapter) as cache:
            for args, kwargs, answer in calls(made.calls()):
                answer(made.model(*args, **kwargs))
            return cache.stats()

    return play, scale.steps


def family(name: str) -> Family:
    return next(f for f in FAMILIES if f.name == name)


SMALL: dict[str, Callable[[], tuple[Play, int]]] = {
    "street, 4 steps": lambda: street(4, "receding"),
    "street, 50 steps": lambda: street(8, "chunked"),
    "Self-Forcing, Causal-Forcing, LongLive 1": lambda: wan(lambda: CausalWanModel(local_attn_size=6), Loop),
    "LongLive 2": lambda: wan(lambda: LongLive2Model(local_attn_size=9, sink_size=3), Loop),
    "CausVid": lambda: wan(CausVidModel, CausVidLoop),
    "Krea Realtime 14B": lambda: wan(KreaModel, KreaLoop),
    "Matrix-Game 2.0": lambda: wan(lambda: GameModel(local_attn_size=6), GameLoop),
    "AnyFlow-FAR 1.3B": lambda: of_diffusers("AnyFlow-FAR"),
    "SANA-WM refiner": lambda: of_diffusers("SANA-WM refiner"),
    "SkyReels-V2 1.3B": lambda: of_diffusers("SkyReels-V2"),
    "Helios": lambda: of_diffusers("Helios"),
    "FramePack": lambda: of_diffusers("FramePack"),
}


def eager(method: Method, its: Family, steps: int) -> Any:
    """A method that leaves out whatever it can."""
    make: Any = getattr(rollcache, method.name)
    repairs = "sparse" if its.repair == "sparse" else "refresh"
    drift = {"max_drift": 1e9, "warmup": 1, "tail": 0, "steps": steps}
    settings: dict[str, dict[str, Any]] = {
        "XCache": {"min_cosine": -1, "margin": 1, "max_deviation": None},
        "WindowReuse": {},
        "C3ache": {},
        "Replan": {"repairs": repairs},
        "StepReuse": {"steps": steps, "anchors": (0,)},
        "FSC": {"steps": steps, "warmup": 1, "anchors": 1, "risk_scale": 1e9, "repairs": repairs},
        "MotionCache": {"threshold": 1e9, "warmup": 1, "chunk_updates": 1, "protect_last": False, "repairs": repairs},
        "Scope": {"steps": steps, "cache_below": 1e8, "predict_below": 1e9, "warmup": 1, "tail": 0},
        "TaylorSeer": {"steps": steps, "interval": 2, "warmup": 1},
        "MagCache": {"steps": steps, "ratios": (1.0,) * steps, "max_error": 1e9, "retention": 0.0},
        "EasyCache": drift,
    }
    return make(**settings.get(method.name, drift))


@pytest.mark.parametrize("its", FAMILIES, ids=lambda f: f.name)
def test_a_method_raises_or_leaves_out_nothing_where_the_page_says_no_and_only_there(its: Family) -> None:
    play, steps = SMALL[its.name]()
    wrong = []
    with torch.no_grad():
        for method in METHODS:
            sign, _ = fit(its, method)
            try:
                skipped, why = play(eager(method, its, steps)).skip_rate, ""
            except RollcacheError as error:
                skipped, why = 0.0, str(error)
            if (skipped == 0) != (sign == "no"):
                wrong.append(f"{method.name} is {sign}, but skips {skipped:.1%} {why}")
    assert not wrong
