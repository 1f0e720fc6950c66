"""Training that can be killed, weights that can be trusted."""

from __future__ import annotations

import copy
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from rollcache.street import weights
from rollcache.street.codec import Codec
from rollcache.street.data import (
    HELD_OUT_SEED,
    LatentSet,
    load_clip,
    load_scenery,
    rendering,
    sample_windows,
    scenery_path,
)
from rollcache.street.dit import DiTConfig, StreetDiT
from rollcache.street.drives import Drive
from rollcache.street.lowrank import attach, merge, updates
from rollcache.street.rig import CELLS, RIG
from rollcache.street.scene import Scene
from rollcache.street.scenery import scenery_of
from rollcache.street.train import (
    CodecTraining,
    StudentTraining,
    TeacherTraining,
    flow_loss,
    train_codec,
    train_student,
    train_teacher,
)
from rollcache.street.training import CheckpointError, NonFiniteLossError, Trainer, muon_and_adamw
from rollcache.street.world import Dtype, World, resolve_dtype


def line(folder: Path, steps: int, **settings: Any) -> tuple[Trainer, nn.Module]:
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


def test_a_checkpoint_of_something_else_is_refused_and_a_full_disk_keeps_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, module = line(tmp_path, 10, stamp="codec a")
    trainer.run(lambda g: regression(module, g))
    with pytest.raises(CheckpointError, match="made with codec a, this run uses codec b"):
        line(tmp_path, 10, stamp="codec b")
    wide = nn.Linear(5, 1)
    with pytest.raises(CheckpointError, match="does not fit this training run"):
        Trainer(tmp_path, wide, [torch.optim.AdamW(wide.parameters())], minutes=1)
    longer, module = line(tmp_path, 20, save_seconds=0, stamp="codec a")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(CheckpointError, match=r"No space left on device.*an earlier step is kept"):
        longer.run(lambda g: regression(module, g))
    assert line(tmp_path, 20, stamp="codec a")[0].step == 10
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint.pt"]
    for junk in (b"half a file", b"junk\n"):
        (tmp_path / "checkpoint.pt").write_bytes(junk)
        with pytest.raises(CheckpointError, match="does not fit this training run"):
            line(tmp_path, 20)


def test_clips_of_another_rig_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "clip-000000-urban.npz"
    images = {g.name: np.zeros((4, len(g.cameras), g.height, g.width, 3), np.uint8) for g in RIG}
    images["rear"] = images["rear"][:, :, :40]
    np.savez(path, action=np.zeros((4, 2), np.float32), **images)
    with pytest.raises(ValueError, match=r"clip-000000-urban.npz is no clip of this rig: view group 'rear'"):
        load_clip(path)
    path.write_bytes(b"PK but no archive")
    with pytest.raises(ValueError, match="is no clip of this rig"):
        load_clip(path)


def test_clips_are_rendered_while_something_else_runs(tmp_path: Path) -> None:
    fake_clip(tmp_path, 4)
    path = tmp_path / "clip-000005-u-turn.npz"
    with rendering(tmp_path, 1, frames=4):
        for _ in range(600):
            if path.exists():
                break
            time.sleep(0.1)
    frames, action = load_clip(path)
    assert len(action) == 4 and len(load_scenery(path)) == 2 and frames["rear"].shape[0] == 4
    with rendering(tmp_path, 0):
        pass


@pytest.mark.slow
def test_both_stages_are_trained_stopped_and_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both stages end to end on a tiny model, with a strip to look at."""
    small = partial(DiTConfig, width=48, heads=3, depth=2)
    monkeypatch.setattr("rollcache.street.train.DiTConfig", small)
    for seed in (0, HELD_OUT_SEED):
        fake_clip(tmp_path, seed)
    codec = Codec(24, width=16, depth=1)
    codec.basis.copy_(torch.linalg.qr(torch.randn(384, 24))[0].T)

    def stop(trainer: Trainer) -> None:
        if trainer.step == 3:
            raise KeyboardInterrupt

    config = TeacherTraining(minutes=0.1, strips=0.04, own_after=0.0, own_every=4)
    with pytest.raises(KeyboardInterrupt):
        train_teacher(tmp_path, codec, tmp_path / "teacher", config, stop)
    teacher = train_teacher(tmp_path, codec, tmp_path / "teacher", config)
    assert teacher.step > 3 and list((tmp_path / "teacher" / "strips").glob("step-*.png"))
    model = StreetDiT(small())
    model.load_state_dict(teacher.averaged())
    before = copy.deepcopy(model.state_dict())
    student = train_student(tmp_path, codec, model, tmp_path / "student", StudentTraining(minutes=0.03, rank=4))
    assert student.step > 0
    assert all(torch.equal(v, model.state_dict()[k]) for k, v in before.items())
    factors = updates(student.averaged())
    assert any(v.any() for k, v in factors.items() if k.endswith(".up"))
    merge(model, factors)
    other = Codec(24)
    other.basis.copy_(torch.linalg.qr(torch.randn(384, 24))[0].T)
    with pytest.raises(CheckpointError, match="made with codec"):
        train_teacher(tmp_path, other, tmp_path / "teacher", config)


def fake_clip(path: Path, seed: int, frames: int = 80) -> None:
    rng = np.random.default_rng(seed)
    images = {g.name: rng.integers(0, 255, (frames, len(g.cameras), g.height, g.width, 3), dtype=np.uint8) for g in RIG}
    clip = path / f"clip-{seed:06d}-urban.npz"
    speed, turn = rng.uniform(0, 9, frames), rng.normal(0, 0.2, frames)
    np.savez(clip, action=np.stack((speed, turn), 1).astype(np.float32), **images)
    scenery = scenery_of(Scene("urban", seed).simulate(Drive("any", speed, turn, "test")))
    save_file(scenery.tensors(), scenery_path(clip))


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
    assert sample.told is not None and sample.told.there.shape[:2] == (1, 12)
    one = sample.window(2, 4)
    assert one.told is not None and torch.equal(one.told.features, sample.told.features[:, 8:])
    assert sample_windows(clips.clips, 2, 4, torch.Generator().manual_seed(1), silent=1.0).told is None
    scenery_path(tmp_path / "clip-000001-urban.npz").unlink()
    with pytest.raises(ValueError, match=r"clip-000001-urban.scenery.safetensors is missing; make it"):
        LatentSet(tmp_path, codec)
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


def test_a_low_rank_student_starts_as_the_teacher_and_is_merged_exactly(tmp_path: Path) -> None:
    teacher = StreetDiT(DiTConfig(width=48, depth=2))
    torch.nn.init.normal_(teacher.head.weight)
    student = copy.deepcopy(teacher)
    trained = attach(student, 4)
    assert sum(p.numel() for p in trained) < 0.35 * sum(p.numel() for p in teacher.parameters())
    assert {id(p) for p in trained} == {id(p) for p in student.parameters() if p.requires_grad}
    assert torch.equal(student.embed.weight, teacher.embed.weight)
    with torch.no_grad():
        for p in trained:
            p += 0.05 * torch.randn(p.shape)
    factors = updates(student.state_dict())
    path = tmp_path / "both.safetensors"
    weights.pack(path, teacher, Codec(24), {}, factors)
    merged, bare = weights.load(path)[0], weights.load(path, "teacher")[0]
    for name, layer in student.named_modules():
        if isinstance(layer, nn.Linear):
            torch.testing.assert_close(merged.get_submodule(name).weight, layer.weight, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(bare.embed.weight, teacher.embed.weight, atol=1e-3, rtol=1e-3)
    with pytest.raises(ValueError, match="choose student or teacher"):
        weights.load(path, "other")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the low-rank update of head does not fit"):
        merge(teacher, {"head.up": factors["head.up"]})


def test_training_can_start_from_weights_of_a_smaller_model(tmp_path: Path) -> None:
    small, large = StreetDiT(DiTConfig(width=48, depth=2)), StreetDiT(DiTConfig(width=48, depth=4))
    path = tmp_path / "small.safetensors"
    weights.pack(path, small, Codec(24), {})
    kept = weights.warm_start(large, path)
    assert kept and all(k.startswith(("blocks.2.", "blocks.3.")) for k in kept)
    torch.testing.assert_close(large.place, small.place, atol=1e-3, rtol=1e-3)


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


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        (None, "no weights file of the street world"),
        ({"config": "{", "facts": "{}"}, "no weights file of the street world"),
        ({"config": "[1]", "facts": "{}"}, "are no object"),
    ],
)
def test_facts_of_something_else_are_refused(packed: Path, meta: dict[str, str] | None, message: str) -> None:
    save_file({"x": torch.zeros(1)}, packed, metadata=meta)
    packed.with_suffix(".sha256").write_text(weights._sha256(packed) + "  x\n")
    with pytest.raises(weights.WeightsError, match=message):
        weights.describe(packed)
    packed.with_suffix(".sha256").write_text("")
    with pytest.raises(weights.WeightsError, match="is damaged"):
        weights.describe(packed)


def test_weights_that_are_not_finite_and_files_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    model = StreetDiT(DiTConfig(width=48, depth=2))
    with torch.no_grad():
        model.place[0, 0] = float("nan")
    weights.pack(tmp_path / "nan.safetensors", model, Codec(24), {})
    with pytest.raises(weights.WeightsError, match=r"not finite, in dit.place"):
        weights.load(tmp_path / "nan.safetensors")
    with pytest.raises((weights.WeightsError, OSError)):
        weights.pack(Path("/proc/none.safetensors"), model, Codec(24), {})
    (tmp_path / "checkpoint.pt").write_bytes(b"junk")
    with pytest.raises(weights.WeightsError, match="is damaged"):
        weights.average_of(tmp_path)


def test_no_budget_is_an_error(tmp_path: Path) -> None:
    module = nn.Linear(2, 1)
    with pytest.raises(ValueError, match="0 minutes"):
        Trainer(tmp_path, module, [torch.optim.AdamW(module.parameters())], minutes=0)


def test_weights_for_other_sizes_are_refused(packed: Path) -> None:
    from safetensors.torch import load_file

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
