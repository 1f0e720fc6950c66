"""FramePack of diffusers under a cache: its real pipeline and model, small, with random weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="the pipelines of diffusers need it: pip install 'rollcache[diffusers]'")
pytest.importorskip("diffusers", reason="the real classes are needed: pip install 'rollcache[diffusers]'")

from diffusers_doubles import Did, Failing, Script, diffusers, done, failing, located, noise, quiet, seeded

import rollcache
from rollcache import FSC, SeaCache, StepReuse, TeaCache, XCache
from rollcache.adapters.diffusers_framepack import adapter, latent, modulated
from rollcache.adapters.loops import generation

STEPS, DEPTH = 3, 4


class Framepack(diffusers.HunyuanVideoFramepackPipeline):  # type: ignore[misc, name-defined]
    """The pipeline without the encoders of text and images."""

    def encode_prompt(self, prompt: Any, **given: Any) -> tuple[Tensor, Tensor, Tensor]:
        seed = len(prompt)
        mask = torch.ones(1, 8)
        mask[:, 4 + seed % 3 :] = 0  # prompts of different length
        return noise(1, 8, 16, seed=seed), noise(1, 8, seed=seed), mask

    def encode_image(self, image: Any, **_: Any) -> Tensor:
        return noise(1, 3, 16, seed=3)

    def prepare_image_latents(self, image: Any, **_: Any) -> Tensor:
        return noise(1, 4, 1, 4, 6, seed=4)


@pytest.fixture(scope="module")
def pipe() -> Any:
    model = seeded(
        lambda: diffusers.HunyuanVideoFramepackTransformer3DModel(
            in_channels=4,
            out_channels=4,
            num_attention_heads=2,
            attention_head_dim=10,
            num_layers=2,
            num_single_layers=2,
            num_refiner_layers=1,
            text_embed_dim=16,
            pooled_projection_dim=8,
            rope_axes_dim=(2, 4, 4),
            has_image_proj=True,
            image_proj_dim=16,
            has_clean_x_embedder=True,
        )
    )
    decoder = diffusers.AutoencoderKLHunyuanVideo(
        latent_channels=4, block_out_channels=(4, 4, 4, 4), layers_per_block=1, norm_num_groups=2
    )
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    return quiet(Framepack(None, None, model, decoder, scheduler, None, None, None, None))


def make(pipe: Any, sections: int = 2, seed: int = 0, **changes: Any) -> Tensor:
    settings = {
        "prompt": "drive on",
        "height": 32,
        "width": 48,
        "latent_window_size": 3,
        "num_frames": 9 * sections,
        "num_inference_steps": STEPS,
        "generator": torch.Generator().manual_seed(seed),
    }
    image = noise(1, 3, 32, 48).clamp(0, 1)
    made: Tensor = pipe(image, output_type="latent", **(settings | changes)).frames[-1]
    return made


def enable(pipe: Any, policy: Any) -> rollcache.Cache:
    return rollcache.enable(pipe.transformer, policy)


GUIDED = {"negative_prompt": "a blur", "true_cfg_scale": 2.0}


@pytest.mark.parametrize("kind", [{}, GUIDED, {"sampling_type": "vanilla"}], ids=["backwards", "guided", "forwards"])
def test_a_cache_that_never_skips_changes_nothing(pipe: Any, kind: dict[str, Any]) -> None:
    bare = make(pipe, **kind)
    for policy in (Script(computed=(0, 1, 2)), XCache(min_cosine=1)):
        with enable(pipe, policy) as handle:
            assert torch.equal(make(pipe, **kind), bare)
        assert handle.stats().skip_rate == 0 and len(handle.trace) > 0
    assert torch.equal(make(pipe, **kind), bare)


def test_a_schedule_skips_what_it_says_in_both_branches(pipe: Any) -> None:
    with enable(pipe, StepReuse(steps=STEPS, anchors=(0, 2))) as handle, generation(pipe.transformer):
        cached = make(pipe, **GUIDED)
    what = ["compute", "replay", "compute"]
    expected = [Did(n, t, b, what[t]) for n in range(2) for t in range(STEPS) for b in ("cond", "uncond")]
    assert done(handle) == expected
    assert torch.isfinite(cached).all() and not torch.equal(cached, make(pipe, **GUIDED))


def test_both_streams_are_replayed(pipe: Any) -> None:
    """The sum of what the blocks added to each of them is what a replay adds."""
    model, calls = pipe.transformer, []
    hook = model.register_forward_pre_hook(lambda m, a, kw: calls.append(kw), with_kwargs=True)
    make(pipe, 1)
    hook.remove()
    blocks = [*model.transformer_blocks, *model.single_transformer_blocks]
    entered: list[Any] = []
    left: list[Any] = []
    hooks = [
        blocks[0].register_forward_pre_hook(lambda m, a: entered.append(a[:2])),
        blocks[-1].register_forward_hook(lambda m, a, out: left.append(out)),
    ]
    with torch.no_grad(), enable(pipe, Script()):
        model(**calls[0])
        model(**calls[1])
    for hook in hooks:
        hook.remove()
    for stream in (0, 1):
        added = left[0][stream] - entered[0][stream]
        assert torch.equal(left[1][stream], entered[1][stream] + added)
        assert added.abs().sum() > 0 and not torch.equal(entered[0][stream], entered[1][stream])


def test_the_section_stands_behind_its_history(pipe: Any) -> None:
    spec, seen = located(adapter(pipe.transformer))
    lengths: list[int] = []
    hook = pipe.transformer.transformer_blocks[0].register_forward_pre_hook(lambda m, a: lengths.append(a[0].shape[1]))
    with rollcache.enable(pipe.transformer, Script(computed=(0, 1, 2)), adapter=spec):
        make(pipe)
    hook.remove()
    assert {w.segments[0].grid for w in seen} == {(3, 2, 3)}
    assert [w.segments[0].stop for w in seen] == lengths
    assert [w.step for w in seen] == [0, 1, 2] * 2
    assert seen[0].time == pytest.approx(1.0) and seen[0].time > seen[1].time > seen[2].time > 0


def test_another_video_and_a_broken_one_leave_nothing_behind(pipe: Any) -> None:
    policy = StepReuse(steps=STEPS, anchors=(0, 2))
    bare = make(pipe, 1)
    with enable(pipe, policy):
        cached = make(pipe, 1)
        make(pipe, 1, seed=4, prompt="drive")
        assert torch.equal(make(pipe, 1), cached)
        with failing(pipe.transformer.single_transformer_blocks[0], 2), pytest.raises(Failing):
            make(pipe, 1, seed=5)
        assert torch.equal(make(pipe, 1), bare), "nothing is trusted after an exception"
        assert torch.equal(make(pipe, 1), cached)
    assert torch.equal(make(pipe, 1), bare)


def test_x_cache_reuses_across_the_sections_of_an_announced_video(pipe: Any) -> None:
    policy = XCache(min_cosine=-1, margin=1, max_deviation=None)
    with enable(pipe, policy) as handle:
        make(pipe)
        assert {d.action for d in done(handle)} == {"compute"}
        with generation(pipe.transformer):
            make(pipe)
    assert {d.chunk for d in done(handle) if d.action == "replay"} == {1}


def test_methods_see_what_block_0_attends_with_and_the_noisy_latent(pipe: Any) -> None:
    block, seen, calls, models = pipe.transformer.transformer_blocks[0], [], [], []
    hooks = [
        block.attn.register_forward_pre_hook(lambda m, a, kw: seen.append(kw["hidden_states"]), with_kwargs=True),
        block.register_forward_pre_hook(lambda m, a: calls.append(a)),
        pipe.transformer.register_forward_pre_hook(lambda m, a, kw: models.append(kw), with_kwargs=True),
    ]
    make(pipe, 1)
    for hook in hooks:
        hook.remove()
    with torch.no_grad():
        for args, expected in zip(calls, seen, strict=True):
            assert torch.equal(modulated(block, args, {}), expected)
    tokens, z = latent(pipe.transformer, (), models[0]), models[0]["hidden_states"]
    start = tokens.shape[1] - 18
    assert tokens.shape[1] == calls[0][0].shape[1]
    assert torch.equal(tokens[:, start + 6 + 3 + 1], z[:, :, 1, 2:4, 2:4].flatten(1)), "frame 1, row 1, column 1"
    assert not tokens[:, :start].any()


@pytest.mark.parametrize(
    "policy",
    [
        TeaCache(max_drift=1e9, warmup=1),
        TeaCache(max_drift=1e9, warmup=1, signal="embedding"),
        SeaCache(max_drift=1e9, warmup=1),
        FSC(steps=4, warmup=1, anchors=1, risk_scale=2, repairs="none"),
    ],
    ids=["teacache", "teacache-embedding", "seacache", "fsc"],
)
def test_methods_across_steps_run_on_it(pipe: Any, policy: Any) -> None:
    with enable(pipe, policy) as handle:
        made = make(pipe, 1, num_inference_steps=4)
    assert torch.isfinite(made).all()
    assert {d.action for d in done(handle)} > {"compute"}


def test_repairing_every_token_is_computing(pipe: Any) -> None:
    bare = make(pipe, 1)
    with enable(pipe, Script(repaired=(1, 2), backend="refresh")) as handle:
        assert torch.allclose(make(pipe, 1), bare, atol=1e-4)
    assert [d.action for d in done(handle)] == ["compute", "repair", "repair"]
