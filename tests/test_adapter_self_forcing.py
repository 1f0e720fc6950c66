"""The adapter of the Self-Forcing family, on doubles that keep the K/V bookkeeping of the public models."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from self_forcing_double import (
    CELLS,
    FRAMES,
    STEPS,
    CausalWanModel,
    CausVidLoop,
    CausVidModel,
    GameLoop,
    GameModel,
    KreaLoop,
    KreaModel,
    LongLive1Loop,
    LongLive1Model,
    LongLive2Model,
    Loop,
    noise_like,
    text,
)
from torch import Tensor, nn

from rollcache import Action, C3ache, Pass, Reason, Role, RollcacheError, StepReuse, WindowReuse, XCache, enable
from rollcache.adapters import find
from rollcache.adapters.check import check_adapter
from rollcache.adapters.self_forcing import ADAPTER, embedding, kind, latent, modulated, self_forcing
from rollcache.adapters.spec import Adapter

EAGER = XCache(min_cosine=0.5, margin=0.5, max_deviation=None)  # passes whatever starts from the same noise

Made = tuple[CausalWanModel, Callable[..., Loop]]
RELATIVES: dict[str, Callable[[], Made]] = {
    "all frames": lambda: (CausalWanModel(), lambda m, **s: Loop(m, window=24, **s)),
    "window": lambda: (CausalWanModel(local_attn_size=6), Loop),
    "window and sink": lambda: (CausalWanModel(local_attn_size=9, sink_size=3), Loop),
    "LongLive 1": lambda: (LongLive1Model(local_attn_size=9, sink_size=3), LongLive1Loop),
    "LongLive 2": lambda: (LongLive2Model(local_attn_size=9, sink_size=3), Loop),
    "Matrix-Game 2": lambda: (GameModel(local_attn_size=6), GameLoop),
    "CausVid": lambda: (CausVidModel(), CausVidLoop),
    "Krea": lambda: (KreaModel(), KreaLoop),
}
COMMITTING = [name for name in RELATIVES if name != "Krea"]


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def watched(adapter: Adapter, passes: list[Pass]) -> Adapter:
    """An adapter that also writes down what it says."""

    def locate(model: Any, args: Any, kwargs: Any) -> Pass:
        passes.append(adapter.locate(model, args, kwargs))
        return passes[-1]

    return replace(adapter, locate=locate)


def said(passes: list[Pass]) -> list[tuple[str, int, int]]:
    return [(p.role.value[0], p.chunk, p.step) for p in passes]


CHUNK = [("d", 0), ("d", 1), ("d", 2), ("d", 3), ("c", 3)]


def chunks(first: int, number: int) -> list[tuple[str, int, int]]:
    return [(role, n, step) for n in range(first, first + number) for role, step in CHUNK]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def new_kv_rows(loop: Loop) -> list[tuple[Tensor, Tensor]]:
    """Per block the K/V rows that the last commit wrote."""
    rows = []
    for kv in loop.kv:
        stop = int(kv["local_end_index"])
        rows.append(
            (kv["k"][:, stop - FRAMES * CELLS : stop].clone(), kv["v"][:, stop - FRAMES * CELLS : stop].clone())
        )
    return rows


@pytest.mark.parametrize("name", RELATIVES)
def test_what_the_adapter_says_is_held_against_what_is_seen(name: str) -> None:
    model, make = RELATIVES[name]()

    def make_inputs() -> Iterator[Any]:
        loop = make(model, shared_noise=True)
        for _ in range(4):
            yield from loop.one_chunk()

    report = check_adapter(model, make_inputs, adapter=self_forcing())
    report.raise_for_failures()
    assert report["K/V after skipped passes"].status == "passed"


def test_a_window_that_only_block_0_moves_for_all_is_found_by_leaving_out_others() -> None:
    """LongLive 2 without `first_pass_exact`: nothing is wrong as long as block 0 is left out with the others."""
    model, make = RELATIVES["LongLive 2"]()

    def make_inputs() -> Iterator[Any]:
        loop = make(model, shared_noise=True)
        for _ in range(4):
            yield from loop.one_chunk()

    report = check_adapter(model, make_inputs, adapter=self_forcing(first_pass_exact=False))
    assert [f.name for f in report.failures] == ["K/V after skipped passes"]
    assert "commit, chunk 3" in report.failures[0].why and "first_pass_exact" in report.failures[0].why


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", RELATIVES)
def test_a_gate_that_never_opens_gives_the_bare_model_bit_for_bit(name: str, shared: bool) -> None:
    model, make = RELATIVES[name]()
    bare = make(model, shared_noise=shared)
    wanted = bare.run(5)
    with enable(model, XCache(min_cosine=1), adapter=self_forcing(fresh_noise=not shared)) as cache:
        loop = make(model, shared_noise=shared)
        assert same(loop.run(5), wanted)
        assert same(loop.state(), bare.state())
        assert cache.stats().skipped == 0 and cache.stats().cells > 0
    assert same(make(model, shared_noise=shared).run(5), wanted)


@pytest.mark.parametrize("name", RELATIVES)
def test_denoise_passes_that_were_left_out_leave_no_trace_in_what_is_committed(name: str) -> None:
    """Commit the bare model's latents after passes that were left out: K/V and indices are the bare model's."""
    model, make = RELATIVES[name]()
    bare, loop = make(RELATIVES[name]()[0], shared_noise=True), make(model, shared_noise=True)
    with enable(model, WindowReuse(), adapter=self_forcing(fresh_noise=False)) as cache:
        for n in range(6):
            if isinstance(loop, KreaLoop):
                loop.past = getattr(bare, "past", None)
                loop.step_chunk(), bare.step_chunk()
                assert same(loop.encoded, bare.encoded), f"chunk {n}"  # type: ignore[attr-defined]
                continue
            loop.denoise()
            loop.commit(bare.step_chunk())
            assert same(loop.state(), bare.state()), f"chunk {n}"
            loop.frame, loop.chunk = bare.frame, bare.chunk
        assert cache.stats().skip_rate >= 0.6


@pytest.mark.parametrize("policy", [XCache(), XCache(front_blocks=0), WindowReuse(), C3ache()], ids=repr)
@pytest.mark.parametrize("name", COMMITTING)
def test_with_skips_every_block_ends_each_chunk_where_the_bare_model_does(name: str, policy: Any) -> None:
    model, make = RELATIVES[name]()
    bare, loop = make(RELATIVES[name]()[0], shared_noise=True), make(model, shared_noise=True)
    with enable(model, policy, adapter=self_forcing(fresh_noise=False)) as cache:
        for n in range(6):
            bare.step_chunk(), loop.step_chunk()
            assert loop.indices() == bare.indices(), f"chunk {n}"
        assert cache.stats().skipped > 0


@pytest.mark.parametrize("name", ["window", "window and sink", "LongLive 1", "LongLive 2"])
def test_the_window_holds_what_was_committed_behind_the_sink_although_blocks_were_skipped(name: str) -> None:
    model, make = RELATIVES[name]()
    loop = make(model, shared_noise=True)
    with enable(model, XCache(), adapter=self_forcing(fresh_noise=False)) as cache:
        assert window_holds_what_was_committed(loop)
        assert cache.stats().skip_rate > 0.3


def window_holds_what_was_committed(loop: Loop) -> bool:
    """Run six chunks; then compare the K/V window of each block with the rows of the chunks that belong into it."""
    written = []
    for _ in range(6):
        loop.step_chunk()
        written.append(new_kv_rows(loop))
    first = loop.model.sink_size // FRAMES
    kept = list(range(first)) + list(range(6 - loop.model.local_attn_size // FRAMES + first, 6))
    return all(
        torch.equal(kv[side], torch.cat([written[n][block][i] for n in kept], 1))
        for block, kv in enumerate(loop.kv)
        for i, side in enumerate("kv")
    )


def test_where_block_0_publishes_its_indices_a_skip_in_the_first_pass_corrupts_the_window() -> None:
    """LongLive 2. Why `first_pass_exact` is needed; with it the test above holds."""
    model = LongLive2Model(local_attn_size=9, sink_size=3)
    with enable(model, XCache(), adapter=self_forcing(fresh_noise=False, first_pass_exact=False)) as cache:
        assert not window_holds_what_was_committed(Loop(model, shared_noise=True))
        assert any(r.action is Action.REPLAY and r.step == 0 for r in cache.trace)
    for policy in (XCache(), XCache(protect="pass"), WindowReuse(), C3ache(first=0)):
        with enable(model, policy, adapter=self_forcing(fresh_noise=False)) as cache:
            assert window_holds_what_was_committed(Loop(model, shared_noise=True))
            assert {r.action for r in cache.trace if r.step == 0} == {Action.COMPUTE}
            assert any(r.action is Action.REPLAY for r in cache.trace)
            assert Reason.REQUIRED in cache.stats().reasons


@pytest.mark.parametrize("name", COMMITTING)
def test_chunks_steps_and_commits_are_told(name: str) -> None:
    model, make = RELATIVES[name]()
    passes: list[Pass] = []
    with enable(model, XCache(), adapter=watched(self_forcing(), passes)):
        make(model).run(3)
    assert said(passes) == chunks(0, 3)
    assert [p.time for p in passes[:5]] == [*(t / 1000 for t in STEPS), 0.0]
    assert {(s.grid, s.start, s.frame_stride) for p in passes for s in p.segments} == {((FRAMES, 2, 2), 0, CELLS)}
    assert all(p.fresh_noise for p in passes)


@pytest.mark.parametrize("name", RELATIVES)
def test_fresh_noise_lets_nothing_pass_the_gate_and_shared_noise_does(name: str) -> None:
    model, make = RELATIVES[name]()
    for shared in (False, True):
        with enable(model, XCache(), adapter=self_forcing(fresh_noise=not shared)) as cache:
            make(model, shared_noise=shared).run(5)
            assert (cache.stats().skip_rate > 0.3) == shared
        with enable(model, WindowReuse(), adapter=self_forcing(fresh_noise=not shared)) as cache:
            make(model, shared_noise=shared).run(5)
            assert (cache.stats().skipped > 0) == shared


def test_step_reuse_works_inside_a_chunk_whatever_the_noise() -> None:
    model = CausalWanModel(local_attn_size=9, sink_size=3)
    bare = Loop(model).run(5)
    with enable(model, StepReuse(steps=4, anchors=(0, 1, 3)), adapter=self_forcing()) as cache:
        cached = Loop(model).run(5)
        assert cache.stats().skip_rate == 0.25
    errors = [(a - b).norm() / b.norm() for a, b in zip(cached, bare, strict=True)]
    assert 0 < max(errors) < 0.2


def test_given_frames_are_a_prefill_and_what_follows_is_chunk_0() -> None:
    model = CausalWanModel(local_attn_size=9)
    passes: list[Pass] = []
    with enable(model, XCache(min_cosine=1), adapter=watched(self_forcing(), passes)):
        loop = Loop(model)
        loop.prefill(noise_like(5))
        loop.prefill(noise_like(6))
        out = loop.run(2)
    assert said(passes) == [("p", 0, 0)] * 2 + chunks(0, 2)
    bare = Loop(model)
    bare.prefill(noise_like(5))
    bare.prefill(noise_like(6))
    assert same(bare.run(2), out)


def test_an_independent_first_frame_starts_over_with_the_shape_of_what_follows() -> None:
    model = CausalWanModel(local_attn_size=9)
    with enable(model, WindowReuse(), adapter=self_forcing(fresh_noise=False)) as cache:
        loop = Loop(model, shared_noise=True)
        loop.step_chunk(frames=1)
        loop.run(2)
        assert {r.chunk for r in cache.trace if r.action is Action.REPLAY} == {2}


def first_chunk_is_exact(cache: Any, loop: Loop, passes: list[Pass]) -> bool:
    """Run two chunks of a generation that begins now: the first is chunk 0 and exact, the second skips."""
    del passes[:]
    seen = len(cache.trace)
    loop.run(2)
    new = list(cache.trace)[seen:]
    assert {r.chunk for r in new} == {0, 1}
    replayed = {r.chunk for r in new if r.action is Action.REPLAY}
    return said(passes) == chunks(0, 2) and replayed == {1}


@pytest.mark.parametrize("name", COMMITTING)
@pytest.mark.parametrize("before", [1, 3])
def test_a_new_generation_in_the_same_kv_begins_with_an_exact_chunk(name: str, before: int) -> None:
    model, make = RELATIVES[name]()
    passes: list[Pass] = []
    with enable(model, EAGER, adapter=watched(self_forcing(fresh_noise=False), passes)) as cache:
        loop = make(model, shared_noise=True)
        loop.run(before)
        if isinstance(loop, GameLoop):
            loop = make(model, shared_noise=True)
        else:
            loop.reset()
        assert first_chunk_is_exact(cache, loop, passes)


def test_a_generation_that_was_left_in_the_middle_of_a_chunk_is_not_gone_on_with() -> None:
    model = CausalWanModel(local_attn_size=9)
    passes: list[Pass] = []
    with enable(model, EAGER, adapter=watched(self_forcing(fresh_noise=False), passes)) as cache:
        loop = Loop(model, shared_noise=True)
        loop.run(2)
        loop.denoise()
        loop.reset()
        assert first_chunk_is_exact(cache, loop, passes)
        loop.reset()
        loop.denoise()  # left in chunk 0
        loop.reset()
        assert first_chunk_is_exact(cache, loop, passes)


@pytest.mark.parametrize("name", ["window", "CausVid"])
@pytest.mark.parametrize("left", [True, False])
def test_a_single_chunk_may_be_followed_by_given_frames_or_by_another_strength(name: str, left: bool) -> None:
    """Nothing but a second clean pass, a K/V index that goes back or a timestep that rises tells the generations."""
    model, make = RELATIVES[name]()
    passes: list[Pass] = []
    with enable(model, EAGER, adapter=watched(self_forcing(fresh_noise=False), passes)) as cache:
        loop = make(model, shared_noise=True)
        loop.denoise() if left else loop.run(1)
        loop.reset()
        if left and name == "CausVid":
            assert first_chunk_is_exact(cache, loop, passes)
            return
        loop.prefill(noise_like(1))
        assert passes[-1].role is Role.PREFILL
        assert first_chunk_is_exact(cache, loop, passes)
    model, make = RELATIVES[name]()
    with enable(model, EAGER, adapter=watched(self_forcing(fresh_noise=False), passes)):
        loop = make(model, shared_noise=True)
        loop.run(1)
        loop.frame, loop.steps = 0, (500.0, 250.0)
        loop.run(1)
    assert said(passes[-8:]) == [*chunks(0, 1), ("d", 0, 0), ("d", 0, 1), ("c", 0, 1)]


def test_new_kv_are_a_rollout_of_their_own_and_take_the_place_of_those_that_are_gone() -> None:
    model = CausalWanModel(local_attn_size=9)
    passes: list[Pass] = []
    with enable(model, EAGER, adapter=watched(self_forcing(fresh_noise=False), passes)) as cache:
        for _ in range(3):
            loop = Loop(model, shared_noise=True)
            assert first_chunk_is_exact(cache, loop, passes)
            assert {p.rollout for p in passes} == {0}
            del loop
            gc.collect()
        kept, other = Loop(model, shared_noise=True), Loop(model, shared_noise=True)
        del passes[:]
        kept.run(1), other.run(1), kept.run(1), other.run(1)
        assert [p.rollout for p in passes] == [0] * 5 + [1] * 5 + [0] * 5 + [1] * 5
        assert said(passes) == chunks(0, 1) * 2 + chunks(1, 1) * 2


def test_two_branches_that_take_turns_pass_by_pass_share_nothing() -> None:
    def run(model: CausalWanModel, guide: float) -> tuple[list[Tensor], list[Tensor]]:
        pos, neg = Loop(model, shared_noise=True), Loop(model, shared_noise=True)
        neg.prompt = text(1)
        out = []
        for n in range(4):
            x = pos.noise(0, FRAMES)
            for step, t in enumerate(STEPS):
                a, b = pos.call(x, t), neg.call(x, t)
                clean = x - t / 1000 * (b + guide * (a - b))
                if step + 1 < len(STEPS):
                    sigma = STEPS[step + 1] / 1000
                    x = (1 - sigma) * clean + sigma * pos.noise(step + 1, FRAMES)
            pos.commit(clean), neg.commit(clean)
            pos.frame = neg.frame = FRAMES * (n + 1)
            out.append(clean)
        return out, [*pos.state(), *neg.state()]

    model = CausalWanModel(local_attn_size=9)
    wanted, state = run(model, 3.0)
    passes: list[Pass] = []
    with enable(model, XCache(min_cosine=1), adapter=watched(self_forcing(), passes)):
        out, cached = run(model, 3.0)
    assert same(out, wanted) and same(cached, state)
    for rollout in (0, 1):
        assert said([p for p in passes if p.rollout == rollout]) == chunks(0, 4)
    with enable(model, XCache(), adapter=self_forcing(fresh_noise=False)) as cache:
        run(model, 3.0)
        for rollout in (0, 1):
            assert any(r.action is Action.REPLAY for r in cache.trace if r.rollout == rollout)
    assert len({p.conditions[0].name for p in passes}) == 1  # prompts are numbered for each K/V cache


def test_an_exception_in_the_middle_makes_the_next_generation_exact() -> None:
    class Broken(Exception):
        pass

    model = CausalWanModel(local_attn_size=9)
    passes: list[Pass] = []
    with enable(model, EAGER, adapter=watched(self_forcing(fresh_noise=False), passes)) as cache:
        loop = Loop(model, shared_noise=True)
        loop.run(2)

        def broken(*_: Any) -> None:
            raise Broken

        hook = model.blocks[0].ffn.register_forward_hook(broken)
        with pytest.raises(Broken):
            loop.step_chunk()
        hook.remove()
        loop.reset()
        assert first_chunk_is_exact(cache, loop, passes)


def test_a_commit_at_another_noise_level_needs_context_noise_and_its_lack_is_noticed() -> None:
    model = CausalWanModel(local_attn_size=9)
    passes: list[Pass] = []
    with enable(model, XCache(), adapter=watched(self_forcing(context_noise=100, fresh_noise=False), passes)) as cache:
        loop = Loop(model, shared_noise=True, context_noise=100)
        loop.prefill(noise_like(3))  # at 0, as the public loops do
        loop.run(2)
        assert said(passes) == [("p", 0, 0), *chunks(0, 2)]
        assert cache.stats().skipped > 0
    with (
        enable(model, XCache(), adapter=self_forcing(fresh_noise=False)),
        pytest.raises(RollcacheError, match="no commit pass of cond since chunk 1"),
    ):
        Loop(model, shared_noise=True, context_noise=100).run(3)
    with pytest.raises(ValueError, match=r"context_noise must be in \[0, 1000\], got -1"):
        self_forcing(context_noise=-1)


def test_another_prompt_is_infinitely_far_and_the_same_one_encoded_again_is_not() -> None:
    model = CausalWanModel(local_attn_size=9)
    with enable(model, XCache.paper(), adapter=self_forcing(fresh_noise=False)) as cache:
        loop = Loop(model, shared_noise=True)
        loop.run(2)
        loop.prompt = loop.prompt.clone()
        loop.run(1)
        loop.prompt = text(7)
        for cross in loop.cross:
            cross["is_init"] = False
        loop.run(2)
        loop.prompt[0, 0, 0] += 1  # written in place
        loop.run(1)
        replayed = [any(r.action is Action.REPLAY for r in cache.trace if r.chunk == n) for n in range(6)]
    assert replayed == [False, True, True, False, True, False]


def test_prompts_given_as_a_list_are_compared_as_well() -> None:
    passes: list[Pass] = []
    model, adapter = CausalWanModel(), watched(self_forcing(), passes)
    loop = Loop(model)
    for prompts in ([text()[0]], [text()[0].clone()], [text(1)[0]], [text(1)[0, :5]]):
        adapter.locate(
            model,
            (loop.noise(0, FRAMES), torch.full((1, FRAMES), 500.0), prompts),
            {"kv_cache": loop.kv, "current_start": 0},
        )
    assert [p.conditions[0].name for p in passes] == ["prompt 1", "prompt 1", "prompt 2", "prompt 3"]


def test_longlive_encodes_the_past_anew_at_another_prompt_and_the_next_chunk_is_exact() -> None:
    model = LongLive1Model(local_attn_size=9, sink_size=3)
    bare, passes = LongLive1Loop(LongLive1Model(local_attn_size=9, sink_size=3)), []
    with enable(model, XCache(min_cosine=1), adapter=watched(self_forcing(), passes)):
        loop = LongLive1Loop(model)
        for each in (bare, loop):
            past = each.run(4)
            each.switch(text(3), past)
            each.last = each.run(2)  # type: ignore[attr-defined]
    assert same(loop.last, bare.last) and same(loop.state(), bare.state())  # type: ignore[attr-defined]
    assert said(passes) == [*chunks(0, 4), ("p", 0, 0), *chunks(0, 2)]


def test_given_frames_inside_a_chunk_make_it_exact() -> None:
    """LongLive 2 from an image: frames at t = 0 in front of those that are denoised."""
    model = CausalWanModel(local_attn_size=9)
    passes: list[Pass] = []
    with enable(model, XCache(), adapter=watched(self_forcing(), passes)):
        loop = Loop(model)
        for t in STEPS[:2]:
            loop.call(noise_like(0), torch.tensor([[0.0, t, t]]))
        loop.commit(noise_like(0))
        loop.frame += FRAMES
        loop.run(1)
    assert said(passes) == [("p", 0, 0)] * 3 + chunks(0, 1)


def test_passes_that_cannot_be_told_raise_and_name_what_did_not_match() -> None:
    model = CausalWanModel(local_attn_size=9)
    with enable(model, XCache(), adapter=self_forcing()):
        loop = Loop(model)
        with pytest.raises(RollcacheError, match=r"holds the timesteps 625, 833\.25, 1000"):
            loop.call(noise_like(0), torch.tensor([[625.0, 833.25, 1000.0]]))
        with pytest.raises(RollcacheError, match="without kv_cache="):
            model(noise_like(0), t=torch.zeros(1, 3), context=text(), seq_len=1)
        for start in (None, torch.tensor([0]), True):
            with pytest.raises(RollcacheError, match="current_start= must be an integer"):
                model(noise_like(0), t=torch.zeros(1, 3), context=text(), kv_cache=loop.kv, current_start=start)
        with pytest.raises(RollcacheError, match="t= must be a tensor"):
            model(noise_like(0), t=500, context=text(), kv_cache=loop.kv, current_start=0)


def test_relatives_are_told_apart_by_what_their_code_takes_and_others_are_refused() -> None:
    assert {name: kind(make()[0]).name for name, make in RELATIVES.items()} == {
        "all frames": "Self-Forcing",
        "window": "Self-Forcing",
        "window and sink": "Self-Forcing",
        "LongLive 1": "LongLive 1",
        "LongLive 2": "LongLive 2",
        "Matrix-Game 2": "Matrix-Game 2.0",
        "CausVid": "CausVid",
        "Krea": "Krea Realtime",
    }

    class Rolling(CausalWanModel):
        def _forward_inference(
            self, x: Tensor, t: Tensor, kv_cache: Any = None, updating_cache: bool = False
        ) -> Tensor:
            return x

    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(2, 2)])

    with pytest.raises(RollcacheError, match="Rolling Forcing"):
        enable(Rolling(), XCache(), adapter=ADAPTER)
    with pytest.raises(RollcacheError, match="Other has no _forward_inference"):
        enable(Other(), XCache(), adapter=ADAPTER)


@pytest.mark.parametrize("name", RELATIVES)
def test_enable_finds_the_adapter_by_what_the_model_looks_like(name: str) -> None:
    model = RELATIVES[name]()[0]
    if type(model) is not CausalWanModel:  # in the public repositories all of them have this name
        model.__class__ = type("CausalWanModel", (type(model),), {})
    assert find(model) is ADAPTER


def test_models_that_are_refused_say_why_and_where_to_read_on() -> None:
    for name, path, reason in (
        ("VideoDiTModel", "videodit_blocks.layers", "four noise levels in one pass"),
        ("HunyuanVideo_1_5_DiffusionTransformer", "double_blocks action_in", "its exact passes cost as much"),
    ):
        model = type(name, (nn.Module,), {})()
        for attribute in path.split():
            first, *rest = attribute.split(".")
            layers = nn.ModuleList()
            setattr(model, first, nn.Module() if rest else layers)
            if rest:
                setattr(getattr(model, first), rest[0], layers)
        with pytest.raises(RollcacheError, match=f"{name} .*{reason}.*docs/backbones/refused.md"):
            enable(model, XCache())


def test_krea_begins_a_chunk_with_the_past_encoded_anew_and_its_last_step_is_no_commit() -> None:
    model, passes = KreaModel(), []
    with enable(model, XCache(), adapter=watched(self_forcing(fresh_noise=False), passes)) as cache:
        loop = KreaLoop(model, shared_noise=True)
        loop.run(3)
        steps = [[("d", n, 0), ("d", n, 1), ("d", n, 2)] for n in range(3)]
        assert said(passes) == [*steps[0], ("c", 0, 2), *steps[1], ("c", 1, 2), *steps[2]]
        assert {p.time for p in passes if p.role is Role.DENOISE and p.step == 2} == {0.0}
        assert any(r.action is Action.REPLAY for r in cache.trace if r.step == 2)
        del passes[:]
        other = KreaLoop(model, shared_noise=True)
        other.kv = loop.kv  # another session, the same buffers
        other.run(2)
        assert said(passes) == [*steps[0], ("c", 0, 2), *steps[1]]


def test_actions_of_the_window_are_conditions_of_fixed_shape() -> None:
    model, passes = GameModel(local_attn_size=6), []
    with enable(model, XCache(min_cosine=1), adapter=watched(self_forcing(), passes)):
        loop = GameLoop(model)
        loop.mouse = torch.randn(loop.mouse.shape)
        loop.keys = torch.rand(loop.keys.shape).round()
        loop.run(4)
    for n in range(4):
        _, mouse, keys = passes[5 * n].conditions
        assert [c.name for c in (mouse, keys)] == ["mouse", "keyboard"]
        # pixel frames from three latent frames before the chunk to its last one; before frame 0 there is frame 0
        frames = [max(f, 0) for f in range(4 * (FRAMES * n - 3), 4 * (FRAMES * (n + 1) - 1) + 1)]
        assert torch.equal(mouse.value, loop.mouse[:, frames]) and torch.equal(keys.value, loop.keys[:, frames])
        assert mouse.scale is not None and mouse.scale.item() == pytest.approx(0.1)
        assert keys.scale is not None and keys.scale.item() == 1


@pytest.mark.parametrize("what", ["mouse", "keys"])
def test_a_key_or_the_mouse_is_followed_in_the_chunk_that_reads_it(what: str) -> None:
    """Pressed at the first frame of chunk 3: its window holds the change, that of chunk 4 is not what chunk 3's was."""
    model = GameModel(local_attn_size=6)
    with enable(model, EAGER, adapter=self_forcing(fresh_noise=False)) as cache:
        loop = GameLoop(model, shared_noise=True)
        if what == "mouse":
            loop.mouse[:, 1 + 4 * (3 * FRAMES - 1) :, 1] = 0.1
        else:
            loop.keys[:, 1 + 4 * (3 * FRAMES - 1) :, 0] = 1
        loop.run(7)
        replayed = [n for n in range(7) if any(r.action is Action.REPLAY for r in cache.trace if r.chunk == n)]
        assert {r.reason for r in cache.trace if r.chunk == 3 and r.block > 0} == {Reason.CONDITION}
    assert replayed == [1, 2, 5, 6]


def test_actions_for_a_model_without_an_action_module_are_refused() -> None:
    model = CausalWanModel()
    loop = Loop(model)
    kwargs = {"kv_cache": loop.kv, "current_start": 0, "keyboard_cond": torch.zeros(1, 9, 4)}
    with pytest.raises(RollcacheError, match="no block has an action_model"):
        ADAPTER.locate(model, (noise_like(0), torch.full((1, FRAMES), 500.0)), kwargs)


def test_latent_modulated_input_and_embedding_are_what_the_model_computes() -> None:
    model = CausalWanModel()
    seen: dict[str, Any] = {}
    block = model.blocks[0]
    hooks = [
        block.register_forward_pre_hook(lambda _, args, kwargs: seen.update(block=(args, kwargs)), with_kwargs=True),
        block.self_attn.register_forward_pre_hook(lambda _, args: seen.update(attends=args[0])),
    ]
    loop = Loop(model)
    x = noise_like(4)
    loop.call(x, 833.25)
    for hook in hooks:
        hook.remove()
    args, kwargs = seen["block"]
    tokens = latent(model, (x,), {})
    weight = model.patch_embedding.weight.flatten(1)
    torch.testing.assert_close(tokens @ weight.T + model.patch_embedding.bias, args[0])
    torch.testing.assert_close(latent(model, (list(x),), {}), tokens)
    torch.testing.assert_close(modulated(block, args, kwargs), seen["attends"])
    assert embedding(block, args, kwargs) is kwargs["e"] and kwargs["e"].shape[1:3] == (FRAMES, 6)
