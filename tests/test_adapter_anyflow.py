"""AnyFlow-FAR of diffusers under a cache: its real pipeline and model, small, with random weights."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="the pipelines of diffusers need it: pip install 'rollcache[diffusers]'")
pytest.importorskip("diffusers", reason="the real classes are needed: pip install 'rollcache[diffusers]'")

from diffusers_doubles import WAN, Failing, Script, diffusers, done, failing, located, noise, quiet, seeded, vae

import rollcache
from rollcache import RollcacheError, StepReuse, TeaCache, XCache
from rollcache.adapters.diffusers_anyflow import adapter, modulated

PARTITION = [1, 2, 2, 1]
STEPS, DEPTH = 2, 3
OPEN = XCache(min_cosine=-1, margin=1, max_deviation=None)


@pytest.fixture(scope="module")
def pipe() -> Any:
    return quiet(
        diffusers.AnyFlowFARPipeline(
            tokenizer=None,
            text_encoder=None,
            vae=vae(),
            scheduler=diffusers.FlowMapEulerDiscreteScheduler(),
            transformer=seeded(lambda: diffusers.AnyFlowFARTransformer3DModel(**WAN, chunk_partition=(1, 2, 2, 1))),
        )
    )


@pytest.fixture(autouse=True)
def unfused_flex_attention() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # flex_attention without torch.compile, on a CPU
        yield


def make(pipe: Any, partition: list[int] = PARTITION, seed: int = 0, **changes: Any) -> Tensor:
    frames = 4 * (sum(partition) - 1) + 1
    settings = {"prompt_embeds": noise(1, 8, 16, seed=1), "height": 32, "width": 32, "num_inference_steps": STEPS}
    generator = torch.Generator().manual_seed(seed)
    made: Tensor = pipe(
        prompt=None,
        num_frames=frames,
        chunk_partition=partition,
        generator=generator,
        output_type="latent",
        **(settings | changes),
    ).frames
    return made


def enable(pipe: Any, policy: Any) -> rollcache.Cache:
    return rollcache.enable(pipe.transformer, policy)


@pytest.fixture(scope="module")
def bare(pipe: Any) -> Tensor:
    return make(pipe)


@pytest.mark.parametrize("policy", [Script(computed=(0, 1)), XCache(min_cosine=1)], ids=["stack", "blocks"])
def test_a_cache_that_never_skips_changes_nothing(pipe: Any, bare: Tensor, policy: Any) -> None:
    with enable(pipe, policy) as handle:
        assert torch.equal(make(pipe), bare)
    assert handle.stats().passes == {"denoise": 8, "commit": 3} and handle.stats().skip_rate == 0


def test_guidance_runs_as_one_batch(pipe: Any) -> None:
    guided = {"guidance_scale": 3.0, "negative_prompt_embeds": torch.zeros(1, 8, 16), "partition": [1, 2]}
    plain = make(pipe, **guided)
    with enable(pipe, Script(computed=(0, 1))) as handle:
        assert torch.equal(make(pipe, **guided), plain)
    assert {d.branch for d in done(handle)} == {"cond"}


def test_positions_roles_and_lengths(pipe: Any) -> None:
    spec, seen = located(adapter(pipe.transformer))
    with rollcache.enable(pipe.transformer, Script(computed=(0, 1)), adapter=spec):
        make(pipe)
    chunk = ["denoise"] * STEPS
    assert [w.role.value for w in seen] == [*[*chunk, "commit"] * 3, *chunk]
    mine = [w for w in seen if w.role.value == "denoise"]
    assert [(w.chunk, w.step) for w in mine] == [(n, t) for n in range(4) for t in range(STEPS)]
    assert [w.segments[0].grid for w in mine[::STEPS]] == [(f, 2, 2) for f in PARTITION]
    assert [w.time for w in mine[:2]] == pytest.approx([1.0, 0.5])


def test_passes_that_encode_run_every_block_and_schedules_skip_the_others(pipe: Any) -> None:
    ran: Counter[bool] = Counter()
    hooks = [
        block.attn1.register_forward_hook(
            lambda m, a, kw, out: ran.update([kw["kv_cache_flag"]["is_cache_step"]]), with_kwargs=True
        )
        for block in pipe.transformer.blocks
    ]
    with enable(pipe, StepReuse(steps=STEPS, anchors=(0,))) as handle:
        cached = make(pipe)
    for hook in hooks:
        hook.remove()
    assert ran == {True: 3 * DEPTH, False: 4 * DEPTH}
    assert [d.action for d in done(handle)] == ["compute", "replay"] * 4
    assert torch.isfinite(cached).all()


def test_chunks_of_one_length_share_and_others_do_not(pipe: Any) -> None:
    with enable(pipe, OPEN) as handle:
        made = make(pipe)
        first = done(handle)
        assert {(d.chunk, d.action) for d in first if d.chunk != 2} == {(n, "compute") for n in (0, 1, 3)}
        assert [d.action for d in first if d.chunk == 2] == ["compute", *["replay"] * (DEPTH - 1)] * STEPS
        assert torch.equal(make(pipe), made), "another video begins with nothing"
        assert done(handle)[len(first) :] == first


def test_a_video_that_goes_on_from_given_frames_reuses_nothing_of_the_last_one(pipe: Any) -> None:
    given = {"video_latents": noise(1, 3, 4, 4, 4), "partition": [1, 2, 2, 2]}
    with enable(pipe, OPEN) as handle:
        make(pipe, [1, 2])
        before = len(handle.trace)
        made = make(pipe, **given)
        assert {d.action for d in done(handle)[before:] if d.chunk == 0} == {"compute"}
        assert {d.chunk for d in done(handle)[before:]} == {0, 1}
    with enable(pipe, OPEN):
        assert torch.equal(make(pipe, **given), made)


def test_a_run_that_was_broken_off_leaves_nothing_to_the_next(pipe: Any, bare: Tensor) -> None:
    policy = StepReuse(steps=STEPS, anchors=(0,))
    with enable(pipe, policy):
        cached = make(pipe)
    with enable(pipe, policy):
        with failing(pipe.transformer.blocks[1], 3), pytest.raises(Failing):  # in the pass that encodes chunk 0
            make(pipe, seed=5)
        made = make(pipe)
        assert torch.equal(make(pipe), cached)
    assert torch.isfinite(made).all()
    assert torch.equal(make(pipe), bare)


def test_methods_see_what_block_0_attends_with(pipe: Any) -> None:
    block, seen, calls = pipe.transformer.blocks[0], [], []
    hooks = [
        block.attn1.register_forward_pre_hook(lambda m, a, kw: seen.append(kw["hidden_states"]), with_kwargs=True),
        block.register_forward_pre_hook(lambda m, a: calls.append(a)),
    ]
    make(pipe, [1, 1])
    for hook in hooks:
        hook.remove()
    for args, expected in zip(calls, seen, strict=True):
        assert torch.equal(modulated(block, args, {}), expected)
    for signal in ("modulated", "embedding"):
        with enable(pipe, TeaCache(max_drift=1e9, warmup=1, signal=signal)) as handle:
            make(pipe, [1, 1])
        assert [d.action for d in done(handle)] == ["compute", "replay"] * 2


def test_calls_without_the_cache_of_keys_and_values_are_refused(pipe: Any) -> None:
    with enable(pipe, XCache()), torch.no_grad(), pytest.raises(RollcacheError, match="without kv_cache"):
        pipe.transformer(
            hidden_states=noise(1, 1, 4, 4, 4),
            timestep=torch.full((1, 1), 500.0),
            r_timestep=torch.full((1, 1), 0.0),
            encoder_hidden_states=noise(1, 8, 16),
            chunk_partition=[1],
        )
