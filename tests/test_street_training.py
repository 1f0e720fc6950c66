"""Training that can be killed, weights that can be trusted."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rollcache.street import weights
from rollcache.street.codec import Codec
from rollcache.street.data import HELD_OUT_SEED, LatentSet, sample_windows
from rollcache.street.dit import DiTConfig, StreetDiT
from rollcache.street.rig import CELLS, RIG
from rollcache.street.train import CodecTraining, flow_loss, train_codec
from rollcache.street.training import NonFiniteLossError, Trainer, muon_and_adamw
from rollcache.street.world import Dtype, World, resolve_dtype


def line(folder: Path, steps: int, **settings: float) -> tuple[Trainer, nn.Module]:
    torch.manual_seed(0)
    module = nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)
    return Trainer(folder, module, [optimizer], minutes=1e6, steps=steps, warmup=5, **settings), module


def regression(module: nn.Module, generator: torch.Generator) -> Tensor:
    x = torch.randn(16, 3, generator=generator)
    return (module(x)[:, 0] - x.sum(1)).square().mean()


def test_a_run_that_was_stopped_half_way_ends_like_one_that_was_not(tmp_path: Path) -> None:
    whole, module = line(tmp_path / "whole", 60)
    whole.run(lambda g: regression(module, g))

    class Stop(Exception):
        pass

    def stop(trainer: Trainer) -> None:
        if trainer.step == 25:
            raise Stop

    halves, module = line(tmp_path / "halves", 60, save_seconds=0)
    with pytest.raises(Stop):
        halves.run(lambda g: regression(module, g), on_step=stop)
    again, module = line(tmp_path / "halves", 60)
    assert again.step == 25
    again.run(lambda g: regression(module, g))
    for key, value in whole.averaged().items():
        torch.testing.assert_close(again.averaged()[key], value)
    assert float(regression(module, torch.Generator().manual_seed(9)).detach()) < 0.1


def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_good_checkpoint(tmp_path: Path) -> None:
    trainer, module = line(tmp_path, 60, save_seconds=0)

    def loss(generator: torch.Generator) -> Tensor:
        return regression(module, generator) * (float("nan") if trainer.step == 10 else 1.0)

    with pytest.raises(NonFiniteLossError, match="step 10"):
        trainer.run(loss)
    assert line(tmp_path, 60)[0].step == 10
    assert all(v.isfinite().all() for v in line(tmp_path, 60)[0].averaged().values())


def test_interrupting_saves_first(tmp_path: Path) -> None:
    trainer, module = line(tmp_path, 60, save_seconds=1e9)

    def interrupt(trainer: Trainer) -> None:
        if trainer.step == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trainer.run(lambda g: regression(module, g), on_step=interrupt)
    assert line(tmp_path, 60)[0].step == 7


def fake_clip(path: Path, seed: int, frames: int = 80) -> None:
    rng = np.random.default_rng(seed)
    images = {g.name: rng.integers(0, 255, (frames, len(g.cameras), g.height, g.width, 3), dtype=np.uint8) for g in RIG}
    np.savez(path / f"clip-{seed:06d}-urban.npz", action=rng.normal(size=(frames, 2)).astype(np.float32), **images)


def test_clips_become_latents_with_their_mirror_image(tmp_path: Path) -> None:
    fake_clip(tmp_path, 0)
    fake_clip(tmp_path, HELD_OUT_SEED)
    codec = Codec(8)
    codec.basis.copy_(torch.linalg.qr(torch.randn(384, 8))[0].T)
    clips = LatentSet(tmp_path, codec)
    assert len(clips.clips) == 2 and clips.clips[0].z.shape == (40, CELLS, 8)
    assert torch.equal(clips.clips[1].action[:, 1::2], -clips.clips[0].action[:, 1::2])
    assert len(LatentSet(tmp_path, codec, held_out=True, mirror=False).clips) == 1
    fake_clip(tmp_path, 1)
    assert clips.refresh() == 4
    sample = sample_windows(clips.clips, 3, 4, torch.Generator().manual_seed(1))
    assert sample.x0.shape == (1, 12, CELLS, 8) and sample.action.shape == (1, 12, 4)
    with pytest.raises(ValueError, match="no clips"):
        LatentSet(tmp_path / "none", codec)


def test_flow_loss_of_an_untrained_model_is_that_of_the_linear_guess(tmp_path: Path) -> None:
    """The target has unit variance where the prior holds, so a model that says nothing scores about one."""
    fake_clip(tmp_path, 0)
    codec = Codec(24)
    codec.basis.copy_(torch.linalg.qr(torch.randn(384, 24))[0].T)
    clips = LatentSet(tmp_path, codec)
    model = StreetDiT(DiTConfig(width=48, depth=2))
    gaps = torch.cat([c.z[1:].float() - c.z[:-1].float() for c in clips.clips])
    model.prior_sd.copy_(gaps.square().mean((0, 1)).sqrt())
    generator = torch.Generator().manual_seed(0)
    losses = [
        flow_loss(model, sample_windows(clips.clips, 2, 4, generator), generator, clean=1.0, context_noise=0.0)
        for _ in range(8)
    ]
    assert 0.7 < float(torch.stack(losses).detach().mean()) < 1.3


def test_muon_takes_the_block_matrices_and_adamw_the_rest() -> None:
    model = StreetDiT(DiTConfig(width=48, depth=2))
    muon, adamw = muon_and_adamw(model, 1e-3)
    count = sum(len(g["params"]) for o in (muon, adamw) for g in o.param_groups)
    assert count == len(list(model.parameters()))
    assert all(p.ndim == 2 for g in muon.param_groups for p in g["params"])


def test_training_without_clips_says_how_to_get_them(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="held-out clips"):
        train_codec(tmp_path, tmp_path / "codec", CodecTraining(minutes=0.01))


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.safetensors"
    weights.pack(path, StreetDiT(DiTConfig(width=48, depth=2)), Codec(24), {"minutes": 1})
    return path


def test_packed_weights_come_back_as_they_were_to_float16(packed: Path) -> None:
    model, codec = weights.load(packed)
    assert model.config.depth == 2 and codec.channels == 24
    assert all(p.dtype == torch.float32 for p in model.parameters())
    facts = weights.describe(packed)
    assert facts["facts"] == {"minutes": 1} and facts["bytes"] == packed.stat().st_size


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: p.write_bytes(p.read_bytes()[:-1] + b"x"), "is damaged"),
        (lambda p: p.unlink(), "no weights at"),
        (lambda p: p.with_suffix(".sha256").unlink(), "cannot be verified"),
    ],
)
def test_damaged_weights_are_refused(packed: Path, damage: object, message: str) -> None:
    damage(packed)  # type: ignore[operator]
    with pytest.raises(weights.WeightsError, match=message):
        weights.load(packed)


def test_weights_of_something_else_are_refused(packed: Path) -> None:
    packed.write_bytes(b"not a safetensors file at all")
    packed.with_suffix(".sha256").write_text(weights._sha256(packed) + "  x\n")
    with pytest.raises(weights.WeightsError, match="no weights file of the street world"):
        weights.load(packed)


def test_weights_for_other_sizes_are_refused(packed: Path) -> None:
    from safetensors.torch import load_file, save_file

    meta = {"config": json.dumps({"width": 96, "depth": 2}), "facts": "{}"}
    save_file(load_file(packed), packed, metadata=meta)
    packed.with_suffix(".sha256").write_text(weights._sha256(packed) + "  x\n")
    with pytest.raises(weights.WeightsError, match="does not fit StreetDiT"):
        weights.load(packed)


@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16"])
def test_only_the_matrix_products_change_dtype(dtype: Dtype) -> None:
    world = World(StreetDiT(DiTConfig(width=48, depth=2)), Codec(24), dtype=dtype)
    assert world.model.embed.weight.dtype == world.dtype
    assert world.model.prior_sd.dtype == torch.float32
    with pytest.raises(ValueError, match="unknown dtype 'int8'"):
        resolve_dtype("int8", torch.device("cpu"))  # type: ignore[arg-type]
