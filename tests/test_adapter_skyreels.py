"""SkyReels-V2 of diffusers under a cache: its real pipeline and model, small, with random weights."""

from __future__ import annotations

import gc
from copy import deepcopy
from itertools import pairwise
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="the pipelines of diffusers need it: pip install 'rollcache[diffusers]'")
pytest.importorskip("diffusers", reason="the real classes are needed: pip install 'rollcache[diffusers]'")

from diffusers_doubles import WAN, Did, Failing, Script, diffusers, done, failing, located, noise, quiet, seeded, vae

import rollcache
from rollcache import FSC, RollcacheError, SeaCache, Stacked, StepReuse, TeaCache, Tokens, WindowReuse, XCache
from rollcache.adapters.diffusers_skyreels import adapter, modulated
from rollcache.adapters.loops import generation
from rollcache.adapters.spec import Slots

STEPS = 4
CELLS = 2 * 3


@pytest.fixture(scope="module")
def pipe() -> Any:
    return quiet(
        diffusers.SkyReelsV2DiffusionForcingPipeline(
            tokenizer=None,
            text_encoder=None,
            transformer=seeded(lambda: diffusers.SkyReelsV2Transformer3DModel(**WAN, inject_sample_info=True)),
            vae=vae(),
            scheduler=diffusers.UniPCMultistepScheduler(
                prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=8.0
            ),
        )
    )


@pytest.fixture(autouse=True)
def causal_blocks(pipe: Any) -> None:
    pipe.transformer._set_ar_attention(1)  # an asynchronous run leaves it changed


PROMPTS = {"prompt_embeds": noise(1, 8, 16, seed=1), "negative_prompt_embeds": torch.zeros(1, 8, 16)}
KINDS: dict[str, dict[str, Any]] = {
    "sync": {"num_frames": 17},
    "async": {"num_frames": 17, "ar_step": 2},
    "causal": {"num_frames": 13, "ar_step": 2, "causal_block_size": 2},
    "long": {"num_frames": 33, "base_num_frames": 17, "overlap_history": 5, "addnoise_condition": 20},
}


def make(pipe: Any, seed: int = 0, **changes: Any) -> Tensor:
    settings = {**PROMPTS, "height": 32, "width": 48, "num_inference_steps": STEPS, "num_frames": 17, **changes}
    torch.manual_seed(seed)  # the noise on frames that a window inherits is drawn from the global generator
    made: Tensor = pipe(prompt=None, output_type="latent", **settings).frames
    return made


def enable(pipe: Any, policy: Any) -> rollcache.Cache:
    return rollcache.enable(pipe.transformer, policy)


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_that_never_skips_changes_nothing(pipe: Any, kind: str) -> None:
    bare = make(pipe, **KINDS[kind])
    for policy in (Script(computed=tuple(range(100))), XCache(min_cosine=1)):
        with enable(pipe, policy) as handle:
            assert torch.equal(make(pipe, **KINDS[kind]), bare)
        assert handle.stats().skip_rate == 0 and len(handle.trace) > 0
    assert torch.equal(make(pipe, **KINDS[kind]), bare)


def test_a_schedule_skips_what_it_says_in_both_branches(pipe: Any) -> None:
    bare = make(pipe)
    with enable(pipe, StepReuse(steps=STEPS, anchors=(0, 2))) as handle:
        cached = make(pipe)
    what = ["compute", "replay", "compute", "replay"]
    assert done(handle) == [Did(0, t, branch, what[t]) for t in range(STEPS) for branch in ("cond", "uncond")]
    assert handle.stats().skip_rate == 0.5
    assert not torch.equal(cached, bare)
    assert torch.isfinite(cached).all()


def test_a_replay_adds_what_the_blocks_of_its_own_branch_added(pipe: Any) -> None:
    model = pipe.transformer
    sample = {"hidden_states": noise(1, 4, 3, 4, 6), "enable_diffusion_forcing": True, "fps": [1]}
    first, second = torch.full((1, 3), 900.0), torch.full((1, 3), 700.0)
    stack: list[tuple[Tensor, Tensor]] = []

    def call(t: Tensor, text: Tensor) -> Tensor:
        return model(timestep=t, encoder_hidden_states=text, return_dict=False, **sample)[0]

    cond, uncond = noise(1, 8, 16, seed=1), noise(1, 8, 16, seed=2)
    hooks = [
        model.blocks[0].register_forward_pre_hook(lambda m, a: stack.append((a[0], a[0]))),
        model.blocks[-1].register_forward_hook(lambda m, a, out: stack.append((stack.pop()[0], out))),
    ]
    with torch.no_grad():
        call(first, cond), call(first, uncond), call(second, cond)
        for hook in hooks:
            hook.remove()
        added, to = [after - before for before, after in stack[:2]], stack[2][0]
        assert not torch.allclose(added[0], added[1], atol=1e-3)
        seen: list[Tensor] = []
        with enable(pipe, Script()), pytest.MonkeyPatch.context() as patch:
            call(first, cond), call(first, uncond)
            head = model.norm_out
            patch.setattr(head, "forward", lambda x, run=head.forward: (seen.append(x), run(x))[1])
            call(second, cond), call(second, uncond)
    assert torch.allclose(seen[0], to + added[0], atol=1e-6)
    assert torch.allclose(seen[1], to + added[1], atol=1e-6)


def test_positions_in_step(pipe: Any) -> None:
    spec, seen = located(adapter(pipe.transformer))
    with rollcache.enable(pipe.transformer, StepReuse(steps=STEPS, anchors=(0,)), adapter=spec):
        make(pipe)
        make(pipe, seed=1, guidance_scale=1.0)
    assert [(w.chunk, w.step, w.branch) for w in seen[:8]] == [(0, t, b) for t in range(4) for b in ("cond", "uncond")]
    assert [(w.chunk, w.step, w.branch) for w in seen[8:]] == [(0, t, "cond") for t in range(4)]
    assert [w.time for w in seen[::2][:4]] == pytest.approx([0.999, 0.96, 0.889, 0.727], abs=2e-3)
    assert seen[0].segments[0].grid == (5, 2, 3) and seen[0].segments[0].stop == 30


def test_every_window_of_a_long_video_is_a_chunk_that_begins_anew(pipe: Any) -> None:
    with enable(pipe, StepReuse(steps=STEPS, anchors=(0, 3))) as handle:
        with generation(pipe.transformer):
            make(pipe, **KINDS["long"])
        assert [d for d in done(handle) if d.branch == "cond"] == [
            Did(n, t, "cond", "compute" if t in (0, 3) else "replay") for n in range(3) for t in range(STEPS)
        ]
        make(pipe, **KINDS["long"])
    assert [d.chunk for d in done(handle)[24:]] == [0] * 24
    assert [d.action for d in done(handle)[24:]] == [d.action for d in done(handle)[:24]]


def test_frames_that_a_window_inherits_do_not_count_for_its_noise_level(pipe: Any) -> None:
    spec, seen = located(adapter(pipe.transformer))
    with rollcache.enable(pipe.transformer, Script(computed=tuple(range(9))), adapter=spec):
        make(pipe, **KINDS["long"])
    times = [w.time for w in seen if w.branch == "cond"]
    assert times[:4] == times[4:8] == times[8:]


def test_behind_one_another_a_window_is_one_chunk_of_many_steps(pipe: Any) -> None:
    spec, seen = located(adapter(pipe.transformer))
    with rollcache.enable(pipe.transformer, Script(computed=tuple(range(0, 99, 2))), adapter=spec) as handle:
        make(pipe, **KINDS["async"])
    mine = [w for w in seen if w.branch == "cond"]
    assert [w.step for w in mine] == list(range(12))
    assert {w.chunk for w in mine} == {0}
    assert all(a.time > b.time for a, b in pairwise(mine))
    assert [d.action for d in done(handle)] == ["compute", "compute", "replay", "replay"] * 6


def test_methods_across_chunks_reuse_only_inside_an_announced_generation(pipe: Any) -> None:
    with enable(pipe, WindowReuse(min_cosine=-1)) as handle:
        make(pipe, **KINDS["long"])
        assert {d.action for d in done(handle)} == {"compute"}
        with generation(pipe.transformer):
            make(pipe, **KINDS["long"])
    after = done(handle)[24:]
    assert {d.action for d in after if d.chunk == 0} == {"compute"}
    assert {d.action for d in after if d.chunk == 1} == {"replay"}
    assert {d.action for d in after if d.chunk == 2} == {"compute"}, "the last window is shorter"


def test_a_method_across_chunks_that_never_finds_anything_hears_of_the_announcement(
    pipe: Any, caplog: pytest.LogCaptureFixture
) -> None:
    for policy, hints in ((WindowReuse(), 1), (TeaCache(max_drift=0, warmup=1), 0)):
        caplog.clear()
        with enable(pipe, policy):
            for _ in range(3):
                make(pipe, **KINDS["long"])
        (told,) = [m for m in caplog.messages if "nothing was replayed" in m]
        assert told.count("`with rollcache.adapters.loops.generation(") == hints


def test_a_run_that_was_broken_off_leaves_nothing_to_the_next(pipe: Any) -> None:
    bare = make(pipe, seed=3)
    with enable(pipe, StepReuse(steps=STEPS, anchors=(0, 2))) as handle:
        cached = make(pipe, seed=3)
        for call in (1, 4, 5):  # inside a computed step of either branch
            with failing(pipe.transformer.blocks[1], call), pytest.raises(Failing):
                make(pipe, seed=5)
            assert torch.equal(make(pipe, seed=3), bare), "nothing is trusted after an exception"
            assert torch.equal(make(pipe, seed=3), cached)
        assert [d.action for d in done(handle)[-8:]] == [d.action for d in done(handle)[:8]]


def test_a_run_that_was_broken_off_between_two_calls_leaves_nothing_to_the_next(pipe: Any) -> None:
    def stop(pipe: Any, step: int, t: Tensor, given: Any) -> Any:
        if step == 1:
            raise Failing
        return given

    with enable(pipe, StepReuse(steps=STEPS, anchors=(0, 2))):
        cached = make(pipe)
        with pytest.raises(Failing):
            make(pipe, seed=5, callback_on_step_end=stop)
        assert torch.equal(make(pipe), cached)


def test_another_size_in_the_next_video_computes_anew(pipe: Any) -> None:
    sizes = [{}, {"height": 48}, {"num_frames": 9}, {"guidance_scale": 1.0}, {}]
    with enable(pipe, StepReuse(steps=STEPS, anchors=(0, 2))):
        together = [make(pipe, **size) for size in sizes]
    for made, size in zip(together, sizes, strict=True):
        with enable(pipe, StepReuse(steps=STEPS, anchors=(0, 2))):
            assert torch.equal(made, make(pipe, **size))


def test_a_prompt_that_changes_in_a_window_is_not_answered_with_the_old_one(pipe: Any) -> None:
    def swap(pipe: Any, step: int, t: Tensor, given: Any) -> Any:
        return {"prompt_embeds": noise(1, 8, 16, seed=9)} if step == 0 else {}

    with enable(pipe, Script()) as handle:
        make(pipe, callback_on_step_end=swap)
    assert [d.action for d in done(handle) if d.branch == "cond"] == ["compute", "compute", "replay", "replay"]
    assert [d.action for d in done(handle) if d.branch == "uncond"] == ["compute", "replay", "replay", "replay"]


def test_what_methods_look_at_is_what_block_0_attends_with(pipe: Any) -> None:
    model, seen = pipe.transformer, []
    hook = model.blocks[0].attn1.register_forward_pre_hook(lambda m, a: seen.append(a[0]))
    calls: list[Any] = []
    other = model.blocks[0].register_forward_pre_hook(lambda m, a: calls.append(a))
    make(pipe, guidance_scale=1.0)
    with torch.no_grad():  # the transformer without diffusion forcing: one timestep for all
        model(noise(1, 4, 3, 4, 6), torch.tensor([500]), noise(1, 8, 16), fps=[1])
    hook.remove(), other.remove()
    assert calls[0][2].ndim == 4 and calls[-1][2].ndim == 3
    for args, expected in zip(calls, seen, strict=True):
        assert torch.equal(modulated(model.blocks[0], args, {}), expected)


def test_methods_across_steps_run_on_it(pipe: Any) -> None:
    bare = make(pipe)
    for policy in (
        TeaCache(max_drift=1e9, warmup=1),
        TeaCache(max_drift=1e9, warmup=1, signal="embedding"),
        SeaCache(max_drift=1e9, warmup=1),
        Stacked(passes=StepReuse(steps=STEPS, anchors=(0, 2)), blocks=XCache(min_cosine=1)),
    ):
        with enable(pipe, policy) as handle:
            cached = make(pipe)
        assert handle.stats().skip_rate > 0 and torch.isfinite(cached).all()
        assert not torch.equal(cached, bare)


def test_an_announced_generation_may_say_its_steps(pipe: Any) -> None:
    with enable(pipe, TeaCache(max_drift=1e9, warmup=1, tail=1)) as handle:
        with generation(pipe.transformer, steps=STEPS):
            make(pipe, guidance_scale=1.0)
        make(pipe, guidance_scale=1.0)
    assert [d.action for d in done(handle)] == ["compute", "replay", "replay", "compute"] + ["compute"] + ["replay"] * 3


def test_samples_at_different_timesteps_are_refused(pipe: Any) -> None:
    with enable(pipe, Script()), torch.no_grad(), pytest.raises(RollcacheError, match="different timesteps"):
        pipe.transformer(noise(2, 4, 1, 4, 6), torch.tensor([[500], [400]]), noise(2, 8, 16), fps=[1, 1])


# --- tokens of a window, one by one ---


def window(pipe: Any, seed: int, frames: int = 4, t: float = 700.0) -> dict[str, Any]:
    return {
        "hidden_states": noise(1, 4, frames, 4, 6, seed=seed),
        "timestep": t - 100 * torch.arange(frames)[None],
        "encoder_hidden_states": noise(1, 8, 16, seed=1),
        "enable_diffusion_forcing": True,
        "fps": [1],
        "return_dict": False,
    }


def block_call(pipe: Any, call: dict[str, Any]) -> tuple[Any, ...]:
    """Arguments of block 0."""
    seen: list[Any] = []
    hook = pipe.transformer.blocks[0].register_forward_pre_hook(lambda m, a: seen.append(a))
    with torch.no_grad():
        pipe.transformer(**call)
    hook.remove()
    args: tuple[Any, ...] = seen[0]
    return args


def naive_repair(pipe: Any, old: tuple[Any, ...], new: tuple[Any, ...], chosen: list[int]) -> Tensor:
    """What leaves the stack for chosen tokens, from the formulas: full matrices, a loop over blocks."""
    h, before = new[0][:, chosen].clone(), old[0]
    for block in pipe.transformer.blocks:
        kv = []
        for x, (_, _, temb, rope, _) in ((before, old), (new[0], new)):
            shift, scale, *_ = (block.scale_shift_table[:, :, None] + temb).unbind(1)
            x = block.norm1(x) * (1 + scale) + shift
            attn = block.attn1
            k = attn.norm_k(attn.to_k(x)).unflatten(2, (2, 16)).double()
            kv.append([turn(k, rope), attn.to_v(x).unflatten(2, (2, 16)).double()])
        _, text, temb, rope, mask = new
        m = block.scale_shift_table[:, :, None] + temb[:, :, chosen]
        x = block.norm1(h) * (1 + m[:, 1]) + m[:, 0]
        q = turn(attn.norm_q(attn.to_q(x)).unflatten(2, (2, 16)).double(), [t[:, chosen] for t in rope])
        k, v = kv[0]
        own_k = turn(attn.norm_k(attn.to_k(x)).unflatten(2, (2, 16)).double(), [t[:, chosen] for t in rope])
        own_v = attn.to_v(x).unflatten(2, (2, 16)).double()
        for i, row in enumerate(chosen):
            k[:, row], v[:, row] = own_k[:, i], own_v[:, i]
        score = torch.einsum("bqhd,bkhd->bhqk", q, k) / 4
        if mask is not None:
            score = score.masked_fill(~mask[:, :, chosen], float("-inf"))
        out = torch.einsum("bhqk,bkhd->bqhd", score.softmax(-1), v).flatten(2).float()
        h = h + attn.to_out[0](out) * m[:, 2]
        h = h + block.attn2(block.norm2(h), text, None, None)
        h = h + block.ffn(block.norm3(h) * (1 + m[:, 4]) + m[:, 3]) * m[:, 5]
        before = block(before, *old[1:])
    return h


def turn(x: Tensor, rope: Any) -> Tensor:
    """Rotary embedding as complex numbers."""
    angle = torch.complex(rope[0][..., ::2], rope[1][..., ::2])
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * angle).flatten(-2)


CHOICES = {
    "all": Tokens((0, 1, 2, 3), (None,)),
    "a frame": Tokens((1,), (None,)),
    "cells": Tokens((0, 2), (torch.tensor([[[1, 4], [0, 3]]]),)),
}


@pytest.mark.parametrize("causal", [1, 2])
@pytest.mark.parametrize("choice", CHOICES)
def test_chosen_tokens_see_the_old_keys_and_values_of_the_others(pipe: Any, choice: str, causal: int) -> None:
    pipe.transformer._set_ar_attention(causal)
    model, tokens = pipe.transformer, CHOICES[choice]
    old, new = block_call(pipe, window(pipe, 0)), block_call(pipe, window(pipe, 1, t=600.0))
    assert old[4] is None if causal == 1 else not old[4].all()
    spec, seen = located(adapter(model))
    with rollcache.enable(model, Script(), adapter=spec), torch.no_grad():
        model(**window(pipe, 0))
    segments = seen[0].segments
    chosen = tokens.rows(segments, torch.device("cpu"))
    rows, slots = adapter(model).sparse, Slots()
    assert rows is not None
    with torch.no_grad():
        expected = naive_repair(pipe, old, new, chosen.tolist())
        rows.capture(old, {}, slots)
        model(**window(pipe, 0))
        out = rows.run(list(model.blocks), new[0][:, chosen], tokens, segments, new, {}, slots)
        assert torch.allclose(out, expected, atol=1e-5)
        dense, last = new[0], new[1:]
        for block in model.blocks:
            dense = block(dense, *last)
    assert torch.equal(out, dense) == (choice == "all")
    assert {type(b.attn1.processor).__name__ for b in model.blocks} == {"SkyReelsV2AttnProcessor"}


@pytest.mark.parametrize("kind", ["sync", "long", "async"])
def test_repairing_every_token_is_computing(pipe: Any, kind: str) -> None:
    bare = make(pipe, **KINDS[kind])
    script = Script(computed=(0, 2), repaired=tuple(range(100)))
    with enable(pipe, script) as handle:
        assert torch.allclose(make(pipe, **KINDS[kind]), bare, atol=1e-4)
    assert {d.action for d in done(handle)} == {"compute", "repair"}


def test_repairs_of_some_tokens_beat_none(pipe: Any) -> None:
    bare = make(pipe)
    some = Tokens((0, 1, 2, 3, 4), (torch.arange(4).expand(1, 5, 4),))
    error = {}
    for name, script in {
        "sparse": Script(repaired=(1, 2, 3), tokens=some),
        "refresh": Script(repaired=(1, 2, 3), tokens=some, backend="refresh"),
        "none": Script(),
    }.items():
        with enable(pipe, script):
            error[name] = float((make(pipe) - bare).norm())
    assert error["sparse"] < error["none"] and error["refresh"] < error["none"]


def test_fsc_runs_with_repairs(pipe: Any) -> None:
    policy = FSC(steps=8, warmup=2, anchors=1, risk_scale=0.5, thresholds=(0.01, 0.5, 1.0, 90.0), max_replays=1)
    with enable(pipe, policy) as handle:
        cached = make(pipe, num_inference_steps=8)
    assert "repair" in {d.action for d in done(handle)}
    assert torch.isfinite(cached).all()
    assert handle.stats().skip_rate > 0.2


def test_an_attention_that_is_not_known_is_not_repaired(pipe: Any) -> None:
    class Other(type(pipe.transformer.blocks[0].attn1.processor)):  # type: ignore[misc]
        pass

    own = pipe.transformer.blocks[1].attn1.processor
    pipe.transformer.blocks[1].attn1.processor = Other()
    try:
        with enable(pipe, Script(repaired=(1,))), pytest.raises(RollcacheError, match="block 1 attends with Other"):
            make(pipe)
    finally:
        pipe.transformer.blocks[1].attn1.processor = own


def test_tokens_are_repaired_in_the_precision_of_the_model(pipe: Any) -> None:
    model = deepcopy(pipe.transformer).to(torch.bfloat16)
    call = {k: v.bfloat16() if torch.is_tensor(v) and v.ndim > 2 else v for k, v in window(pipe, 0).items()}
    later = {**call, "timestep": call["timestep"] - 50}
    with torch.no_grad():
        bare = model(**later)[0]
        with rollcache.enable(model, Script(repaired=(1,))) as handle:
            model(**call)
            assert torch.equal(model(**later)[0], bare)
    assert [d.action for d in done(handle)] == ["compute", "repair"]


def test_keys_and_values_are_given_back_when_the_cache_goes(pipe: Any) -> None:
    with enable(pipe, Script(repaired=(1,))) as handle:
        make(pipe)
        kept = [
            ref(t)
            for o in handle._engine.rollouts.values()
            for s in o.stacks.values()
            for kv in s.slots.values()
            for t in kv
        ]
        assert kept and all(k() is not None for k in kept)
    gc.collect()
    assert not any(k() is not None for k in kept)


def test_fused_projections_are_repaired_as_well(pipe: Any) -> None:
    model = pipe.transformer
    for block in model.blocks:
        block.attn1.fuse_projections()
    try:
        bare = make(pipe)
        with enable(pipe, Script(repaired=(1, 2, 3))):
            assert torch.allclose(make(pipe), bare, atol=1e-4)
    finally:
        for block in model.blocks:
            block.attn1.unfuse_projections()
