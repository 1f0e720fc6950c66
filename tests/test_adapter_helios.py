"""Helios of diffusers under a cache: its real pipelines and model, small, with random weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="the pipelines of diffusers need it: pip install 'rollcache[diffusers]'")
pytest.importorskip("diffusers", reason="the real classes are needed: pip install 'rollcache[diffusers]'")

from diffusers_doubles import WAN, Did, Failing, Script, diffusers, done, failing, located, noise, quiet, seeded, vae

import rollcache
from rollcache import FSC, SeaCache, StepReuse, TeaCache, XCache
from rollcache.adapters.diffusers_helios import adapter, latent, modulated
from rollcache.adapters.loops import generation

STEPS = 3


@pytest.fixture(scope="module")
def pipe() -> Any:
    decoder = vae()
    decoder.decode = lambda z, return_dict: (z.new_zeros(1, 3, 33, 64, 64),)  # nobody looks at the frames
    return quiet(
        diffusers.HeliosPipeline(
            tokenizer=None,
            text_encoder=None,
            vae=decoder,
            scheduler=diffusers.HeliosScheduler(stages=1),
            transformer=seeded(lambda: diffusers.HeliosTransformer3DModel(**WAN, rope_dim=(8, 4, 4))),
        )
    )


def make(pipe: Any, chunks: int = 2, seed: int = 0, **changes: Any) -> Tensor:
    settings = {
        "prompt_embeds": noise(1, 8, 16, seed=1),
        "negative_prompt_embeds": torch.zeros(1, 8, 16),
        "height": 64,
        "width": 64,
        "num_frames": 33 * chunks,
        **({} if "pyramid_num_inference_steps_list" in changes else {"num_inference_steps": STEPS}),
        "generator": torch.Generator().manual_seed(seed),
    }
    made: Tensor = pipe(prompt=None, output_type="latent", **(settings | changes)).frames
    return made


def enable(pipe: Any, policy: Any) -> rollcache.Cache:
    return rollcache.enable(pipe.transformer, policy)


def test_a_cache_that_never_skips_changes_nothing(pipe: Any) -> None:
    bare = make(pipe)
    for policy in (Script(computed=(0, 1, 2)), XCache(min_cosine=1)):
        with enable(pipe, policy) as handle:
            assert torch.equal(make(pipe), bare)
        assert handle.stats().skip_rate == 0 and len(handle.trace) > 0
    assert torch.equal(make(pipe), bare)
    assert bare.abs().sum() > 0


def test_a_schedule_skips_what_it_says_in_both_branches(pipe: Any) -> None:
    with enable(pipe, StepReuse(steps=STEPS, anchors=(0, 2))) as handle, generation(pipe.transformer):
        cached = make(pipe)
    what = ["compute", "replay", "compute"]
    expected = [Did(n, t, b, what[t]) for n in range(2) for t in range(STEPS) for b in ("cond", "uncond")]
    assert done(handle) == expected
    assert torch.isfinite(cached).all() and not torch.equal(cached, make(pipe))


def test_the_chunk_stands_behind_its_history(pipe: Any) -> None:
    spec, seen = located(adapter(pipe.transformer))
    lengths: list[int] = []
    hook = pipe.transformer.blocks[0].register_forward_pre_hook(lambda m, a: lengths.append(a[0].shape[1] - a[4]))
    with rollcache.enable(pipe.transformer, Script(computed=(0, 1, 2)), adapter=spec):
        make(pipe, guidance_scale=1.0)
    hook.remove()
    assert {w.segments[0].grid for w in seen} == {(9, 4, 4)}
    assert [w.segments[0].start for w in seen] == lengths
    assert [w.step for w in seen] == [0, 1, 2] * 2
    assert seen[0].time == pytest.approx(0.999, abs=1e-3) and seen[0].time > seen[1].time > seen[2].time > 0


def test_another_video_and_a_broken_one_leave_nothing_behind(pipe: Any) -> None:
    policy = StepReuse(steps=STEPS, anchors=(0, 2))
    bare = make(pipe, 1)
    with enable(pipe, policy):
        cached = make(pipe, 1)
        make(pipe, 1, seed=4, width=96)
        assert torch.equal(make(pipe, 1), cached)
        with failing(pipe.transformer.blocks[2], 2), pytest.raises(Failing):
            make(pipe, 1, seed=5)
        assert torch.equal(make(pipe, 1), bare), "nothing is trusted after an exception"
        assert torch.equal(make(pipe, 1), cached)
    assert torch.equal(make(pipe, 1), bare)


def test_x_cache_reuses_across_the_chunks_of_an_announced_video(pipe: Any) -> None:
    policy = XCache(min_cosine=-1, margin=1, max_deviation=None)
    with enable(pipe, policy) as handle:
        make(pipe)
        assert {d.action for d in done(handle)} == {"compute"}
        with generation(pipe.transformer):
            make(pipe)
    assert {d.chunk for d in done(handle) if d.action == "replay"} == {1}


def test_methods_see_what_block_0_attends_with_and_the_noisy_latent(pipe: Any) -> None:
    block, seen, calls, models = pipe.transformer.blocks[0], [], [], []
    hooks = [
        block.attn1.register_forward_pre_hook(lambda m, a: seen.append(a[0])),
        block.register_forward_pre_hook(lambda m, a: calls.append(a)),
        pipe.transformer.register_forward_pre_hook(lambda m, a, kw: models.append(kw), with_kwargs=True),
    ]
    make(pipe, 1, guidance_scale=1.0)
    for hook in hooks:
        hook.remove()
    for args, expected in zip(calls, seen, strict=True):
        assert torch.equal(modulated(block, args, {}), expected)
    tokens, z = latent(pipe.transformer, (), models[0]), models[0]["hidden_states"]
    start = calls[0][0].shape[1] - calls[0][4]
    assert tokens.shape == (1, calls[0][0].shape[1], 16)
    assert torch.equal(tokens[:, start + 16 + 4 + 1], z[:, :, 1, 2:4, 2:4].flatten(1)), "frame 1, row 1, column 1"
    assert not tokens[:, :start].any()


@pytest.mark.parametrize(
    "policy",
    [
        TeaCache(max_drift=1e9, warmup=1),
        TeaCache(max_drift=1e9, warmup=1, signal="embedding"),
        SeaCache(max_drift=1e9, warmup=1),
        FSC(steps=4, warmup=1, anchors=1, risk_scale=2, max_replays=1, repairs="refresh"),
    ],
    ids=["teacache", "teacache-embedding", "seacache", "fsc"],
)
def test_methods_across_steps_run_on_it(pipe: Any, policy: Any) -> None:
    with enable(pipe, policy) as handle:
        made = make(pipe, 1, num_inference_steps=4)
    assert torch.isfinite(made).all()
    assert {d.action for d in done(handle)} > {"compute"}


def test_repairing_every_token_keeps_only_the_history_of_the_last_computed_pass(pipe: Any) -> None:
    """What the chunk adds is fresh; the history has no grid, so that its tokens are replayed and read by nobody."""
    bare = make(pipe, 1)
    with enable(pipe, Script(repaired=(1, 2), backend="refresh")) as handle:
        assert torch.allclose(make(pipe, 1), bare, atol=1e-4)
    assert [d.action for d in done(handle) if d.branch == "cond"] == ["compute", "repair", "repair"]


def test_every_stage_of_a_pyramid_is_a_chunk_with_tokens_of_its_own(pipe: Any) -> None:
    pyramid = quiet(
        diffusers.HeliosPyramidPipeline(
            tokenizer=None,
            text_encoder=None,
            vae=pipe.vae,
            scheduler=diffusers.HeliosScheduler(gamma=0.33),  # 1/3 makes a covariance singular
            transformer=pipe.transformer,
        )
    )
    settings = {"pyramid_num_inference_steps_list": [3, 3, 3], "height": 64, "width": 64}
    bare = make(pyramid, 1, **settings)
    spec, seen = located(adapter(pipe.transformer))
    with rollcache.enable(pipe.transformer, Script(computed=(0, 1, 2)), adapter=spec), generation(pipe.transformer):
        assert torch.equal(make(pyramid, 1, **settings), bare)
    mine = [w for w in seen if w.branch == "cond"]
    assert [(w.chunk, w.step) for w in mine] == [(n, t) for n in range(3) for t in range(3)]
    assert len({w.segments[0].grid for w in mine}) == 3
    with enable(pyramid, StepReuse(steps=3, anchors=(0, 2))) as handle:
        make(pyramid, 1, **settings)
    assert [d.action for d in done(handle) if d.branch == "cond"] == ["compute", "replay", "compute"] * 3
