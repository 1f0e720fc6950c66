"""One window of the street world that is denoised again and again from the same state. Specific to that world."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

import rollcache
from rollcache import StepReuse
from rollcache.bench.calibrate.trajectory import Recorder, Seen, Trajectory
from rollcache.policies.base import PolicyConfig
from rollcache.street.data import latent_actions
from rollcache.street.world import Session


class Window(Session):
    """A session under the chunked protocol that stands before one window; nothing is committed until `advance`."""

    def place(self, action: Tensor) -> None:
        """The actions of the window to come [frames_per_step, 2] in m/s and rad/s."""
        self._action = latent_actions(torch.as_tensor(action, dtype=torch.float32, device=self.world.device))
        self._described = self._told(self._action, len(self._action))
        self._here = self._where(self._action, self._described)

    def noise(self) -> Tensor:
        """Where the trajectory begins [F, P, Z]."""
        return self._noise()

    @torch.inference_mode()
    def velocity(self, x: Tensor, step: int) -> Tensor:
        """The model at latent `x` [F, P, Z] and denoising step `step`."""
        sigma = self._sigmas[step]
        where = replace(self._here, step=step, sigma=sigma)
        return self._pass(x, sigma, self._action, self._described, where)

    @torch.inference_mode()
    def follow(self, x: Tensor, first: int = 0, on_step: Callable[[int, Tensor], None] | None = None) -> Tensor:
        """Euler steps from latent `x` before step `first` to the clean window [F, P, Z].

        Args:
            x: latent [F, P, Z].
            first: the step to begin with.
            on_step: called with every step and the latent after it.
        """
        for step, (t, t_next) in enumerate(pairwise(self._sigmas)):
            if step >= first:
                x = x - (t - t_next) * self.velocity(x, step)
                if on_step is not None:
                    on_step(step, x)
        return x

    @torch.inference_mode()
    def advance(self, clean: Tensor) -> None:
        """The window is over: write the K/V of `clean` [F, P, Z] and stand before the next one."""
        self._commit(clean, self._action, self._described)
        self.chunk += 1


def record(window: Window, method: PolicyConfig | None = None) -> Trajectory:
    """Denoise the window that a session stands before, under a method across steps or (None) at full compute."""
    seen: list[Seen] = []
    latents = [window.noise()]
    with rollcache.enable(window.world.model, Recorder(hand=seen.append, method=method)):
        window.follow(latents[0], on_step=lambda step, x: latents.append(x))
    return Trajectory(tuple(window.protocol.sigmas.tolist()), tuple(latents), tuple(seen))


def replayed(window: Window, anchors: tuple[int, ...]) -> Tensor:
    """The clean window [F, P, Z] when only `anchors` are computed, under the library's own `StepReuse`."""
    policy = StepReuse(steps=window.protocol.steps, anchors=anchors)
    with rollcache.enable(window.world.model, policy):
        return window.follow(window.noise())
