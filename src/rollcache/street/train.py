"""Training the street world: the codec, the many-step teacher, and the four-step student.

Each function is resumable (same folder, same arguments) and returns the trainer; `weights.pack` turns the three
folders into the file that ships.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from rollcache.street.codec import Codec, to_patches
from rollcache.street.data import (
    HELD_OUT_SEED,
    LatentClip,
    LatentSet,
    WindowSample,
    load_clip,
    mirror_frames,
    rendering,
    sample_windows,
)
from rollcache.street.dit import DiTConfig, StreetDiT, WindowKV
from rollcache.street.lowrank import attach
from rollcache.street.own import OwnRollouts
from rollcache.street.protocol import Protocol
from rollcache.street.rig import RIG
from rollcache.street.strips import save_strip, strip
from rollcache.street.training import Trainer, muon_and_adamw
from rollcache.street.weights import load, warm_start

OnStep = Callable[[Trainer], None]


@dataclass(frozen=True, kw_only=True)
class CodecTraining:
    """Budget and sizes of the codec's decoder training (its encoder is fitted in closed form)."""

    minutes: float = 8.0
    lr: float = 1.5e-3
    batch: int = 24
    channels: int = 24
    fit_clips: int = 48
    start: Path | None = None  # weights file whose codec to go on with; its latent space stays
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class TeacherTraining:
    """Budget and recipe of the flow-matching teacher."""

    minutes: float = 90.0
    lr: float = 2e-3
    clean: float = 0.5  # probability that a context window is clean
    context_noise: float = 0.3  # largest sd of the noise on clean context
    three: float = 0.35  # probability of three windows per sample instead of two
    silent: float = 0.08  # probability of a sample that tells nothing of the scene
    start: Path | None = None  # weights file to start from; what it lacks starts as at random
    own: float = 0.4  # probability of a sample whose context the model generated itself
    own_after: float = 0.25  # share of the budget from which on it does
    own_every: int = 48  # steps between rollouts that make such context
    render: int = 0  # clips to render while it trains, besides those that are there
    strips: float = 10.0  # minutes between pictures of held-out rollouts; 0 is none
    compile: bool = False
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class StudentTraining:
    """Budget and recipe of the piecewise distillation."""

    minutes: float = 12.0
    lr: float = 2e-3
    rank: int = 16  # of the difference to the teacher in every matrix
    substeps: int = 3
    context_noise: float = 0.3
    silent: float = 0.08
    seed: int = 1


def train_codec(data: Path, folder: Path, config: CodecTraining, on_step: OnStep | None = None) -> Trainer:
    """Fit the linear encoder and train the residual decoder on the clips in `data`."""
    torch.manual_seed(config.seed)
    codec = Codec(config.channels)
    linear = folder / "linear.pt"
    paths = sorted(p for p in data.glob("clip-??????-*.npz") if int(p.name[5:11]) < HELD_OUT_SEED)
    held_out = sorted(p for p in data.glob("clip-??????-*.npz") if int(p.name[5:11]) >= HELD_OUT_SEED)
    if not paths or not held_out:
        raise ValueError(f"{data} needs training clips and held-out clips (seeds from {HELD_OUT_SEED}).")
    if config.start is not None:
        codec = load(config.start)[1]
    elif linear.exists():
        codec.load_state_dict(torch.load(linear, weights_only=True), strict=False)
    else:
        folder.mkdir(parents=True, exist_ok=True)
        codec.fit(_sample_patches(paths[: config.fit_clips]))
        torch.save({k: getattr(codec, k) for k in ("mean", "basis", "scale")}, linear)
    decoder = [p for n, p in codec.named_parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(decoder, lr=config.lr, betas=(0.9, 0.98))
    trainer = Trainer(folder, codec, [optimizer], minutes=config.minutes, ema=0.99, seed=config.seed, recipe=config)
    pool: list[dict[str, Tensor]] = []

    def step(generator: torch.Generator) -> Tensor:
        if not pool or torch.rand((), generator=generator) < 0.02:  # a slowly changing set of clips in memory
            path = paths[int(torch.randint(len(paths), (), generator=generator))]
            pool.append(load_clip(path)[0])
            del pool[:-6]
        frames = pool[int(torch.randint(len(pool), (), generator=generator))]
        group = RIG[int(torch.multinomial(torch.tensor([2.0, 4.0, 1.0]), 1, generator=generator))]
        target = _random_pairs(frames[group.name], config.batch, generator)
        return _codec_loss(codec, target)

    @torch.no_grad()
    def evaluate() -> float:
        generator = torch.Generator().manual_seed(0)
        losses = [_codec_mse(codec, load_clip(p)[0], generator) for p in held_out[:6]]
        return float(-10 * torch.tensor(losses).mean().log10())

    trainer.run(step, evaluate=evaluate, every=250, on_step=on_step)
    return trainer


def train_teacher(
    data: Path,
    codec: Codec,
    folder: Path,
    config: TeacherTraining,
    on_step: OnStep | None = None,
    device: str = "cpu",
) -> Trainer:
    """Train the teacher: flow matching, an independent noise level per window, noisy context, held actions."""
    torch.manual_seed(config.seed)
    clips = LatentSet(data, codec)
    held_out = LatentSet(data, codec, held_out=True, mirror=False)
    model = StreetDiT(DiTConfig(channels=codec.channels))
    if config.start is None:
        _measure_priors(model, clips)
    else:
        warm_start(model, config.start)
    model.to(device)
    trainer = Trainer(
        folder,
        model,
        muon_and_adamw(model, config.lr),
        minutes=config.minutes,
        seed=config.seed,
        stamp=f"codec {codec.tag}",
        recipe=config,
    )
    model.train()
    if config.compile:
        for block in model.blocks:
            block.compile(dynamic=False)
    size = model.config.window
    own = OwnRollouts(codec)

    def step(generator: torch.Generator) -> Tensor:
        if trainer.step % 100 == 99:
            clips.refresh()
        if trainer.progress >= config.own_after and config.own > 0 and trainer.step % config.own_every == 0:
            own.add(model, trainer.averaged(), clips.clips, generator)
        windows = 3 if torch.rand((), generator=generator) < config.three else 2
        if own.clips and float(torch.rand((), generator=generator)) < config.own:
            drifted = own.draw(generator)
            sample = sample_windows([drifted.clip], windows, size, generator, config.silent, drifted.seen)
        else:
            sample = sample_windows(clips.clips, windows, size, generator, config.silent)
        return flow_loss(model, sample, generator, clean=config.clean, context_noise=config.context_noise)

    @torch.no_grad()
    def evaluate() -> float:
        generator = torch.Generator().manual_seed(0)
        samples = [sample_windows(held_out.clips, 2, size, generator) for _ in range(24)]
        losses = [flow_loss(model, s, generator, clean=1.0, context_noise=0.0) for s in samples]
        return float(torch.stack(losses).mean())

    watch = _with_strips(on_step, model, codec, held_out.clips, config.strips)
    with rendering(data, config.render):
        trainer.run(step, evaluate=evaluate, every=200, on_step=watch)
    return trainer


def _with_strips(
    on_step: OnStep | None, model: StreetDiT, codec: Codec, clips: list[LatentClip], minutes: float
) -> OnStep | None:
    """Also paint what the averaged weights generate, every so many minutes of training."""
    if minutes <= 0:
        return on_step
    painted = [-1]

    def watch(trainer: Trainer) -> None:
        if on_step:
            on_step(trainer)
        now = int(trainer.seconds / (60 * minutes))
        if now > painted[0]:
            if painted[0] >= 0:  # a run that goes on does not begin with a picture
                picture = strip(model, trainer.averaged(), codec, clips[now % len(clips)])
                save_strip(trainer.folder / "strips" / f"step-{trainer.step:06d}.png", picture)
            painted[0] = now

    return watch


def train_student(
    data: Path,
    codec: Codec,
    teacher: StreetDiT,
    folder: Path,
    config: StudentTraining,
    on_step: OnStep | None = None,
    device: str = "cpu",
) -> Trainer:
    """Distil the teacher piece by piece: one student step reproduces `substeps` Euler steps of the teacher."""
    torch.manual_seed(config.seed)
    clips = LatentSet(data, codec)
    teacher.to(device)
    student = copy.deepcopy(teacher)
    teacher.eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(attach(student, config.rank), lr=config.lr, betas=(0.9, 0.98), weight_decay=0.0)
    trainer = Trainer(
        folder,
        student,
        [optimizer],
        minutes=config.minutes,
        ema=0.99,
        decay=0.5,
        seed=config.seed,
        stamp=f"codec {codec.tag}",
        recipe=config,
    )
    sigmas = Protocol().sigmas.tolist()
    size = student.config.window
    device = _device(student)

    def step(generator: torch.Generator) -> Tensor:
        sample = sample_windows(clips.clips, 2, size, generator, config.silent)
        before, context = _noisy_context(sample, config.context_noise, generator)
        noise = torch.randn(before[:, :size].shape, generator=generator)
        i = int(torch.randint(len(sigmas) - 1, (), generator=generator))
        t0, t1 = sigmas[i], sigmas[i + 1]
        z = (1 - t0) * sample.x0[:, size:] + t0 * noise
        both = torch.cat((before[:, :size], z), 1)
        both, z, context, sample = both.to(device), z.to(device), context.to(device), sample.to(device)
        first, last = sample.window(0, size), sample.window(1, size)
        kv = WindowKV(1)
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16):
            zero = torch.zeros(1, 1, device=device)
            known, when = first.known, first.time
            teacher(
                both[:, :size], zero, first.action, context[:, :1], known, when, told=first.told, kv=kv, commit=True
            )
            y = z
            for t, t_next in itertools.pairwise(torch.linspace(t0, t1, config.substeps + 1).tolist()):
                v = teacher(y, zero + t, last.action, context[:, 1:], last.known, last.time, told=last.told, kv=kv)
                y = y - (t - t_next) * v
        levels = torch.tensor([[0.0, t0]], device=device)
        with torch.autocast(device.type, torch.bfloat16):
            v = student(both, levels, sample.action, context, sample.known, sample.time, told=sample.told)[:, size:]
        return F.mse_loss(v, (z - y) / (t0 - t1))

    trainer.run(step, every=50, on_step=on_step)
    return trainer


def flow_loss(
    model: StreetDiT, sample: WindowSample, generator: torch.Generator, *, clean: float, context_noise: float
) -> Tensor:
    """Flow-matching loss, weighted to unit variance at every noise level; the last window is always noisy."""
    size = model.config.window
    windows = sample.known.shape[1]
    device = _device(model)
    t = torch.sigmoid(0.3 + 1.2 * torch.randn(1, windows, generator=generator))
    is_clean = torch.rand(1, windows, generator=generator) < clean
    is_clean[:, -1] = False
    t = torch.where(is_clean, torch.zeros(()), t).to(device)
    base, context = _noisy_context(sample, context_noise, generator)
    noise = torch.randn(sample.x0.shape, generator=generator).to(device)
    base, context, sample = base.to(device), context.to(device), sample.to(device)
    t_n = t.repeat_interleave(size, 1)[..., None, None]
    noisy = (t_n > 0).float()
    z = torch.where(t_n > 0, (1 - t_n) * sample.x0 + t_n * noise, base)
    with torch.autocast(device.type, torch.bfloat16):
        v = model(z, t, sample.action, context, sample.known, sample.time, told=sample.told)
    error = ((v - (noise - sample.x0)) / model.spread(t, sample.known)).square() * noisy
    return error.mean() / noisy.mean()


def _device(model: StreetDiT) -> torch.device:
    return model.place.device


def _noisy_context(sample: WindowSample, most: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Clean latents and context latents with the noise that stands in for the model's own errors."""

    def noise(x: Tensor, share: float) -> Tensor:
        on = float(torch.rand((), generator=generator) < share)
        sd = on * most * torch.rand((), generator=generator)
        return x + sd * torch.randn(x.shape, generator=generator)

    return noise(sample.seen, 0.5), noise(sample.context, 0.6)


def _measure_priors(model: StreetDiT, clips: LatentSet) -> None:
    """Spread of the latents around the context latent, per distance and channel, measured on the data."""
    generator = torch.Generator().manual_seed(0)
    size = model.config.window
    samples = [sample_windows(clips.clips, 1, size, generator) for _ in range(200)]
    samples = [s for s in samples if s.known.all()]
    gap = torch.cat([s.x0 - s.context for s in samples])  # [K, size, P, Z]
    model.prior_sd.copy_(gap.square().mean((0, 2)).sqrt().clamp_min(0.05))
    model.bare_sd.copy_(torch.cat([s.x0 for s in samples]).square().mean((0, 1, 2)).sqrt())


def _sample_patches(paths: list[Path], per_clip: int = 8000) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    out = []
    for path in paths:
        frames, _ = load_clip(path)
        for side in (frames, mirror_frames(frames)):
            for group in RIG:
                flat = to_patches(side[group.name]).flatten(0, 3)
                out.append(flat[torch.randint(len(flat), (per_clip // 6,), generator=generator)])
    return torch.cat(out)


def _random_pairs(frames: Tensor, n: int, generator: torch.Generator) -> Tensor:
    """`n` random frame pairs [n, 2, 3, H, W] in [0, 1] of one group's clip [T, V, H, W, 3]."""
    t = 2 * torch.randint(frames.shape[0] // 2, (n,), generator=generator)
    v = torch.randint(frames.shape[1], (n,), generator=generator)
    pairs = torch.stack((frames[t, v], frames[t + 1, v]), 1)
    if torch.rand((), generator=generator) < 0.5:
        pairs = pairs.flip(3)
    return pairs.permute(0, 1, 4, 2, 3).float() / 255


def _pairs_to_latents(codec: Codec, target: Tensor) -> Tensor:
    patches = to_patches(target.permute(1, 0, 3, 4, 2))[0]  # [n, h, w, PATCH_DIM]
    return ((patches - codec.mean) @ codec.basis.T / codec.scale).permute(0, 3, 1, 2)


def _codec_loss(codec: Codec, target: Tensor) -> Tensor:
    with torch.autocast(target.device.type, torch.bfloat16):
        image = codec.decode_images(_pairs_to_latents(codec, target))
    return F.mse_loss(image.float(), target)


def _codec_mse(codec: Codec, frames: dict[str, Tensor], generator: torch.Generator) -> float:
    errors = []
    for group in RIG:
        target = _random_pairs(frames[group.name], 12, generator)
        image = codec.decode_images(_pairs_to_latents(codec, target)).clamp(0, 1)
        errors.append((image - target).square().mean() * len(group.cameras))
    return float(sum(errors) / sum(len(g.cameras) for g in RIG))
