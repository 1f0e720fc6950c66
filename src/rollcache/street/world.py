"""The street world: load the weights, start a rollout, step it with actions."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from rollcache.street.codec import Codec
from rollcache.street.data import extrapolate, hold, latent_actions
from rollcache.street.describe import Described, describe, describe_log
from rollcache.street.dit import StreetDiT, WindowKV
from rollcache.street.protocol import Protocol, Where
from rollcache.street.rig import CELLS, FRAMES_PER_LATENT
from rollcache.street.scenery import Scenery, driven

Dtype = Literal["auto", "float32", "bfloat16"]
_ROLLOUTS = itertools.count()


@dataclass(frozen=True)
class Start:
    """Where a rollout begins: a whole number of windows of real latents.

    Attributes:
        latents: [F0, P, Z], F0 a multiple of the window.
        action: action per latent [F0, A] in physical units.
        scenery: what stands and drives there; its first F0 latent frames are the start, the later ones are how the
            traffic will go on. None tells the model nothing.
    """

    latents: Tensor
    action: Tensor
    scenery: Scenery | None = None

    def perturbed(self, sd: float, seed: int = 0) -> Start:
        """The same start with Gaussian noise of `sd` on the latents: measures the numerical floor."""
        generator = torch.Generator().manual_seed(seed)
        return replace(self, latents=self.latents + sd * torch.randn(self.latents.shape, generator=generator))


@dataclass(frozen=True)
class Emission:
    """What one generation step returns.

    Attributes:
        latents: [f, P, Z], the new latent frames.
        seconds: time in the transformer (all passes of this step, commit pass included; describing the scene is not
            counted).
        passes: transformer passes run.
    """

    latents: Tensor
    seconds: float
    passes: int


class World:
    """Transformer and codec with one set of weights.

    Args:
        model: the transformer.
        codec: the video codec.
        dtype: dtype of the matrix products; `auto` takes bfloat16 where the processor has it.
        device: torch device.
    """

    def __init__(self, model: StreetDiT, codec: Codec, dtype: Dtype = "auto", device: str = "cpu") -> None:
        self.device = torch.device(device)
        self.dtype = resolve_dtype(dtype, self.device)
        self.model = model.eval().requires_grad_(False).to(self.device)
        self.codec = codec.eval().requires_grad_(False).to(self.device)
        for module in self.model.modules():
            if isinstance(module, nn.Linear):
                module.to(self.dtype)

    @classmethod
    def load(
        cls,
        path: Path | None = None,
        dtype: Dtype = "auto",
        device: str = "cpu",
        stage: Literal["student", "teacher"] = "student",
    ) -> World:
        """The world with the shipped weights, or those of `path`; raises `WeightsError` if the file is damaged.

        Args:
            path: a weights file.
            dtype: see `World`.
            device: see `World`.
            stage: `student` needs four denoising steps, `teacher` many.
        """
        from rollcache.street.weights import load

        return cls(*load(path, stage), dtype=dtype, device=device)

    def start(self, frames: dict[str, Tensor], action: Tensor, scenery: Scenery | None = None) -> Start:
        """A start from real frames (group -> [T, V, H, W, 3]), their actions [T, 2], and what is there to be told."""
        size = FRAMES_PER_LATENT * self.model.config.window
        count = len(action)
        if count % size or count == 0:
            raise ValueError(f"a start needs a multiple of {size} frames, got {count}.")
        frames = {name: x.to(self.device) for name, x in frames.items()}
        if scenery is not None:
            if len(scenery) < count // FRAMES_PER_LATENT:
                raise ValueError(f"the scenery has {len(scenery)} latent frames; the start needs {count // 2}.")
            scenery = scenery.to(self.device)
        return Start(self.codec.encode(frames), latent_actions(action.float().to(self.device)), scenery)

    def decode(self, latents: Tensor) -> dict[str, Tensor]:
        """Latents [F, P, Z] to frames in [0, 1], group -> [2F, V, H, W, 3]."""
        with torch.inference_mode():
            return self.codec.decode(latents)


class Session:
    """One rollout of the world under a protocol.

    Args:
        world: the world.
        start: real latents that fill the K/V cache.
        protocol: what a generation step does.
        seed: seed of all noise of the rollout.
        reuse: asked before every generation step; True emits the sub-chunk from the last denoised window without any
            pass (only under `receding`, never in the step that starts a cycle).
    """

    def __init__(
        self,
        world: World,
        start: Start,
        protocol: Protocol | None = None,
        seed: int = 0,
        reuse: Callable[[Where], bool] | None = None,
    ) -> None:
        self.world, self.protocol, self.seed, self.reuse = world, protocol or Protocol(), seed, reuse
        if self.protocol.window != world.model.config.window:
            raise ValueError(
                f"the protocol's window ({self.protocol.window}) is not the model's ({world.model.config.window})."
            )
        self.rollout = next(_ROLLOUTS)
        self.chunk = 0
        self.kv = WindowKV(world.model.config.kv_windows)
        self._sigmas = self.protocol.sigmas.tolist()
        self._actions: list[Tensor] = []  # commanded actions of this window, one [1, A] a latent
        self._emitted: list[Tensor] = []
        self._plan: Tensor | None = None  # actions that will probably follow [n, A]
        self._window: Tensor | None = None
        if start.scenery is not None and len(start.scenery) < len(start.latents):
            raise ValueError(f"the scenery has {len(start.scenery)} latent frames; the start has {len(start.latents)}.")
        self.scenery = start.scenery
        self._frame = 0  # latent frames before this window
        self._pose: Tensor | None = None  # of the ego before this window
        self._aside = 0.0  # seconds of this step that were not spent in the transformer
        self._prefill(start)

    @property
    def frames_per_step(self) -> int:
        """Pixel frames (and actions) per generation step."""
        return FRAMES_PER_LATENT * self.protocol.latents_per_chunk

    @torch.inference_mode()
    def step(self, action: Tensor, plan: Tensor | None = None) -> Emission:
        """Generate the next chunk.

        Args:
            action: commanded (speed m/s, yaw rate rad/s) of the frames to come [frames_per_step, 2].
            plan: what will probably be commanded after them [any number of frames, 2], such as a driving policy's
                own plan; only the receding loop looks ahead. Frames of the window that it does not reach are held.

        Raises:
            ValueError: wrong shapes, or numbers that are not finite.
        """
        self._plan = self._checked_plan(plan)
        action = torch.as_tensor(action, dtype=torch.float32, device=self.world.device)
        if action.shape != (self.frames_per_step, 2):
            raise ValueError(f"action has shape {tuple(action.shape)}; expected ({self.frames_per_step}, 2).")
        if not torch.isfinite(action).all():
            raise ValueError("action holds NaN or infinite numbers.")
        began, self._aside = time.perf_counter(), 0.0
        kind = self.protocol.kind
        advance = {"receding": self._step_receding, "sliding": self._step_sliding}.get(kind, self._step_window)
        latents, passes = advance(latent_actions(action))
        if self.world.device.type == "cuda":
            torch.cuda.synchronize()
        self.chunk += 1
        return Emission(latents, time.perf_counter() - began - self._aside, passes)

    def _step_receding(self, action: Tensor) -> tuple[Tensor, int]:
        size = self.protocol.window
        j = self.chunk % size
        if j == 0:
            self._actions, self._emitted = [], []
        self._actions.append(action)
        known = torch.cat(self._actions)  # [j + 1, A]
        held = self._ahead(known, size)
        told = self._told(held, j + 1)
        where = self._where(held, told)
        passes = 0
        if self._window is None or where.kv_update or self.reuse is None or not self.reuse(where):
            self._window = self._denoise(held, told, where)
            passes = self.protocol.steps
        self._emitted.append(self._window[j : j + 1])
        if j == size - 1:
            self._commit(torch.cat(self._emitted), known, told)
            passes += 1
        return self._emitted[-1], passes

    def _ahead(self, known: Tensor, size: int) -> Tensor:
        """The actions of a window [size, A] of which the first are known [j + 1, A]."""
        if self._plan is not None:
            known = torch.cat((known, self._plan))[:size]
        missing = size - len(known)
        window = torch.cat((known, known[-1:].expand(missing, -1)))
        fill = extrapolate if self.protocol.ahead == "extrapolate" else hold
        return fill(window, len(known))

    def _checked_plan(self, plan: Tensor | None) -> Tensor | None:
        """A plan [frames, 2] as whole latents [n, A]; None where there is none."""
        if plan is None or self.protocol.kind != "receding":
            return None
        plan = torch.as_tensor(plan, dtype=torch.float32, device=self.world.device)
        if plan.ndim != 2 or plan.shape[-1] != 2 or not torch.isfinite(plan).all():
            raise ValueError(f"a plan must be finite numbers [frames, 2], got shape {tuple(plan.shape)}.")
        whole = len(plan) // FRAMES_PER_LATENT * FRAMES_PER_LATENT
        return latent_actions(plan[:whole]) if whole else None

    def _step_sliding(self, action: Tensor) -> tuple[Tensor, int]:
        size = self.protocol.window
        j = self.chunk % size
        if j == 0:
            self._actions, self._emitted, self._cycle = [], [], (self._context, self._frame, self._pose)
        self._actions.append(action)
        held = hold(action.expand(size, -1), 1)
        told = self._told(held, 1)
        made = self._denoise(held, told, self._where(held, told))[:1]
        self._emitted.append(made)
        if j < size - 1:
            self._advance(made, action)
            return made, self.protocol.steps
        self._context, self._frame, self._pose = self._cycle
        self._time -= size - 1
        known = torch.cat(self._actions)
        self._commit(torch.cat(self._emitted), known, self._told(known, size))
        return made, self.protocol.steps + 1

    def _step_window(self, action: Tensor) -> tuple[Tensor, int]:
        told = self._told(action, len(action))
        where = self._where(action, told)
        window = self._denoise(action, told, where)
        if self.chunk % self.protocol.kv_every == 0:
            self._commit(window, action, told)
            return window, self.protocol.steps + 1
        self._advance(window, action)
        return window, self.protocol.steps

    def _told(self, action: Tensor, known: int) -> Described | None:
        """What the cameras see in this window, of which the first `known` latent frames have happened."""
        if self.scenery is None:
            return None
        assert self._pose is not None
        began = time.perf_counter()
        stop = self._frame + self.protocol.window
        agents = self.scenery.agents(self._frame, stop, known)
        told = describe(self.scenery, driven(self._pose, action), *agents)
        self._aside += time.perf_counter() - began
        return told

    def _where(self, action: Tensor, told: Described | None) -> Where:
        every = self.protocol.kv_every
        first = self.chunk % every == 0
        return Where(
            self.rollout,
            self.chunk,
            0,
            "denoise",
            kv_update=every > 1 and first,
            fresh_noise=first or self.protocol.noise != "per_cycle",
            action=action,
            agents=None if told is None else told.agents(),
            steps=self.protocol.steps,
            frame=None if self.protocol.latents_per_chunk > 1 else self._emits(),
        )

    def _emits(self) -> int:
        """The latent frame of its window that this generation step emits."""
        return self.chunk % self.protocol.window if self.protocol.kind == "receding" else 0

    def _denoise(self, action: Tensor, told: Described | None, where: Where) -> Tensor:
        """Denoising steps from this generation step's noise to a clean window [F, P, Z]."""
        x = self._noise()
        before: tuple[Tensor, float] | None = None  # the last velocity, and the step that was made with it
        for i, (t, t_next) in enumerate(itertools.pairwise(self._sigmas)):
            velocity, step = self._pass(x, t, action, told, replace(where, step=i, sigma=t)), t - t_next
            if self.protocol.solver == "multistep" and before is not None:
                x = x - step * (velocity + step / (2 * before[1]) * (velocity - before[0]))
            else:
                x = x - step * velocity
            before = velocity, step
        return x

    def _commit(self, window: Tensor, action: Tensor, told: Described | None) -> None:
        """Exact pass on the clean window that writes its K/V; the next window starts after it."""
        where = Where(self.rollout, self.chunk, 0, "commit", action=action)
        self._pass(window, 0.0, action, told, where, commit=True)
        self._advance(window, action)

    def _advance(self, window: Tensor, action: Tensor) -> None:
        """These latents have happened: what comes starts after them, from where their actions led the ego."""
        self._context, self._time = window[-1], self._time + len(window)
        self._frame += len(window)
        if self._pose is not None:
            self._pose = driven(self._pose, action)[-1]

    def _pass(
        self, x: Tensor, t: float, action: Tensor, told: Described | None, where: Where, commit: bool = False
    ) -> Tensor:
        known = self._context is not None
        context = self._context if known else torch.zeros_like(x[0])
        device = x.device
        return self.world.model(
            x[None],
            torch.full((1, 1), t, device=device),
            action[None],
            context[None, None],
            torch.full((1, 1), float(known), device=device),
            torch.full((1, 1), float(self._time), device=device),
            told=None if told is None else told.map(lambda x: x[None]),
            kv=self.kv,
            commit=commit,
            where=where,
        )[0]

    def _noise(self) -> Tensor:
        p = self.protocol
        shape = (p.window, CELLS, self.world.model.config.channels)

        def draw(key: int) -> Tensor:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + key)
            return torch.randn(shape, generator=generator).to(self.world.device)

        if p.noise == "fresh":
            return draw(2 * self.chunk + 1)
        shared = draw(2 * (self.chunk // p.kv_every))
        if p.noise == "per_cycle":
            return shared
        return p.rho**0.5 * shared + (1 - p.rho) ** 0.5 * draw(2 * self.chunk + 1)

    @torch.inference_mode()
    def _prefill(self, start: Start) -> None:
        size = self.protocol.window
        windows = len(start.latents) // size
        if windows * size != len(start.latents) or windows == 0:
            raise ValueError(f"a start needs a multiple of {size} latents, got {len(start.latents)}.")
        self._context: Tensor | None = None
        self._time = 0
        for w in range(windows):
            part = slice(w * size, (w + 1) * size)
            where = Where(self.rollout, -1, 0, "prefill", action=start.action[part])
            told = None if self.scenery is None else describe_log(self.scenery, part.start, part.stop)
            self._pass(start.latents[part], 0.0, start.action[part], told, where, commit=True)
            self._advance(start.latents[part], start.action[part])
        if self.scenery is not None:
            self._pose = self.scenery.pose[self._frame - 1]


def resolve_dtype(dtype: Dtype, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 on CUDA and on processors with bfloat16 units, float32 elsewhere."""
    if dtype == "auto":
        if device.type == "cuda":
            return torch.bfloat16
        probe = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
        return torch.bfloat16 if probe and probe() else torch.float32
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f"unknown dtype {dtype!r}; choose auto, float32 or bfloat16.")
    return torch.float32 if dtype == "float32" else torch.bfloat16
