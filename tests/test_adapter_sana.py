"""The SANA-WM refiner of diffusers under a cache: its real pipeline and model, small, with random weights."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="the pipelines of diffusers need it: pip install 'rollcache[diffusers]'")
pytest.importorskip("diffusers", reason="the real classes are needed: pip install 'rollcache[diffusers]'")

from diffusers.models.transformers.transformer_sana_wm_refiner import SanaWMRefinerKVCache
from diffusers_doubles import Did, Failing, Script, diffusers, done, failing, located, noise, quiet, seeded

import rollcache
from rollcache import RollcacheError, StepReuse, TeaCache, XCache
from rollcache.adapters.diffusers_sana import adapter, modulated

STEPS, BLOCK = 3, 3


class Refiner(diffusers.SanaWMLTX2Refiner):  # type: ignore[misc, name-defined]
    """The pipeline without its text encoder."""

    def _encode_prompt(self, prompt: str, *, device: Any, dtype: Any) -> tuple[Tensor, Tensor]:
        return noise(1, 5, 16, seed=len(prompt)), torch.ones(1, 5)


@pytest.fixture(scope="module")
def pipe() -> Any:
    model = seeded(
        lambda: diffusers.SanaWMLTX2RefinerTransformer3DModel(
            in_channels=8,
            out_channels=8,
            num_attention_heads=2,
            attention_head_dim=16,
            cross_attention_dim=32,
            num_layers=3,
            caption_channels=16,
            audio_in_channels=4,
            audio_out_channels=4,
            audio_num_attention_heads=2,
            audio_attention_head_dim=8,
            audio_cross_attention_dim=16,
        )
    )
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=1.0)
    return quiet(Refiner(model, None, None, None, scheduler))


def make(pipe: Any, frames: int = 10, seed: int = 0, prompt: str = "drive", **changes: Any) -> Tensor:
    latent = noise(1, 8, frames, 4, 6, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    refined: Tensor = pipe(latent, prompt, fps=16, generator=generator, output_type="latent", **changes)
    return refined


def enable(pipe: Any, policy: Any) -> rollcache.Cache:
    return rollcache.enable(pipe.transformer, policy)


@pytest.mark.parametrize("frames", [4, 10, 12])  # the last has a shorter block at the end
def test_a_cache_that_never_skips_changes_nothing(pipe: Any, frames: int) -> None:
    bare = make(pipe, frames)
    for policy in (Script(computed=(0, 1, 2)), XCache(min_cosine=1)):
        with enable(pipe, policy) as handle:
            assert torch.equal(make(pipe, frames), bare)
        chunks = -(-(frames - 1) // BLOCK)
        assert handle.stats().passes == {"denoise": STEPS * chunks, "commit": chunks, "prefill": 1}
        assert handle.stats().skip_rate == 0
    assert torch.equal(make(pipe, frames), bare)


def test_positions_roles_and_noise_levels(pipe: Any) -> None:
    spec, seen = located(adapter(pipe.transformer))
    with rollcache.enable(pipe.transformer, XCache(), adapter=spec):
        make(pipe)
        make(pipe, 4)
    roles = [(w.role.value, w.chunk, w.step) for w in seen]
    block = [("denoise", t) for t in range(STEPS)] + [("commit", 0)]
    first = [("prefill", 0, 0)] + [(role, n, t) for n in range(3) for role, t in block]
    assert roles == first + [("prefill", 0, 0)] + [(role, 0, t) for role, t in block]
    assert [w.time for w in seen[1:4]] == pytest.approx([0.909375, 0.725, 0.421875])


def test_every_pass_that_captures_runs_every_block(pipe: Any) -> None:
    ran: Counter[str] = Counter()
    hooks = [
        block.attn1.register_forward_hook(lambda m, a, kw, out: ran.update([kw["kv_cache_mode"]]), with_kwargs=True)
        for block in pipe.transformer.transformer_blocks
    ]
    with enable(pipe, StepReuse(steps=STEPS, anchors=(0,))) as handle:
        cached = make(pipe)
    for hook in hooks:
        hook.remove()
    assert ran == {"capture_pre_rope": 3, "inject": 3 * 3, "inject_and_capture_post_rope": 3 * 3}
    assert [d.action for d in done(handle)] == ["compute", "replay", "replay"] * 3
    assert torch.isfinite(cached).all() and not torch.equal(cached, make(pipe))


def test_an_open_gate_replays_across_blocks_what_it_may(pipe: Any) -> None:
    with enable(pipe, XCache(min_cosine=-1, margin=1, max_deviation=None)) as handle:
        make(pipe)
        depth = 3
        assert handle.stats().skip_rate == pytest.approx((depth - 1) / depth)
        replayed = [d for d in done(handle) if d.action == "replay"]
        assert {(d.chunk, d.step) for d in replayed} == {(n, t) for n in (1, 2) for t in range(STEPS)}
        before = len(handle.trace)
        make(pipe)
        again = done(handle)[before:]
    assert {d.action for d in again if d.chunk == 0} == {"compute"}, "another video reuses nothing of this one"
    assert "replay" in {d.action for d in again if d.chunk == 1}


def test_a_shorter_block_at_the_end_is_computed(pipe: Any) -> None:
    with enable(pipe, XCache(min_cosine=-1, margin=1, max_deviation=None)) as handle:
        made = make(pipe, frames=12)  # blocks of 3, 3, 3 and 2 frames
    assert {d.action for d in done(handle) if d.chunk == 3} == {"compute"}
    assert torch.isfinite(made).all()


def test_the_next_video_is_what_it_would_be_alone(pipe: Any) -> None:
    policy = XCache(min_cosine=-1, margin=1, max_deviation=None)
    with enable(pipe, policy):
        together = [make(pipe, seed=1), make(pipe, seed=2), make(pipe, frames=7), make(pipe, prompt="other words")]
    alone = []
    for changes in ({"seed": 1}, {"seed": 2}, {"frames": 7}, {"prompt": "other words"}):
        with enable(pipe, policy):
            alone.append(make(pipe, **changes))
    assert all(torch.equal(a, b) for a, b in zip(together, alone, strict=True))


def test_a_run_that_was_broken_off_leaves_nothing_to_the_next(pipe: Any) -> None:
    policy = XCache(min_cosine=-1, margin=1, max_deviation=None)
    with enable(pipe, policy):
        cached = make(pipe)
    for call in (1, 3, 5, 7):
        with enable(pipe, policy) as handle:
            with failing(pipe.transformer.transformer_blocks[0], call), pytest.raises(Failing):
                make(pipe, seed=5)
            made = make(pipe)
            assert torch.equal(make(pipe), cached)
        assert Did(0, 0, "cond", "compute") in done(handle)
        assert torch.isfinite(made).all()


def test_methods_see_what_block_0_attends_with(pipe: Any) -> None:
    block, seen, calls = pipe.transformer.transformer_blocks[0], [], []
    hooks = [
        block.attn1.register_forward_pre_hook(lambda m, a: seen.append(a[0])),
        block.register_forward_pre_hook(lambda m, a, kw: calls.append(kw), with_kwargs=True),
    ]
    make(pipe, frames=4)
    for hook in hooks:
        hook.remove()
    for kwargs, expected in zip(calls, seen, strict=True):
        assert torch.equal(modulated(block, (), kwargs), expected)
    for signal in ("modulated", "embedding"):
        with enable(pipe, TeaCache(max_drift=1e9, warmup=1, signal=signal)) as handle:
            make(pipe, frames=4)
        assert [d.action for d in done(handle)] == ["compute", "replay", "replay"]


def test_calls_without_the_cache_of_keys_and_values_are_refused(pipe: Any) -> None:
    model = pipe.transformer
    rope = model.build_rotary_emb_for_absolute_positions(1, [0], 4, 6, torch.device("cpu"), 16.0)
    call = {
        "hidden_states": noise(1, 24, 8),
        "encoder_hidden_states": noise(1, 5, 16),
        "timestep": torch.full((1, 24), 500.0),
        "video_rotary_emb": rope,
    }
    with enable(pipe, XCache()), torch.no_grad():
        with pytest.raises(RollcacheError, match="without kv_cache"):
            model(**call)
        kv = SanaWMRefinerKVCache(3)
        mixed = {**call, "timestep": torch.linspace(0, 900, 24)[None]}
        with pytest.raises(RollcacheError, match="timesteps from 0 to 900"):
            model(**mixed, kv_cache=kv, kv_cache_mode="inject")
