"""Rollout protocols: what a generation step denoises, from which noise, what it emits and when K/V is written.

A protocol is part of every measurement: skip rates and speedups can only be compared inside one protocol.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["receding", "chunked", "shared", "sliding"]
KINDS: tuple[str, ...] = ("receding", "chunked", "shared", "sliding")
Noise = Literal["fresh", "per_cycle", "correlated"]


@dataclass(frozen=True)
class Where:
    """Where in the rollout one pass of the transformer stands; the loop says it, nobody guesses.

    Attributes:
        rollout: id of the rollout.
        chunk: generation step `n`, counted from 0 over the rollout.
        step: denoising step `t` inside the chunk.
        role: "denoise", "commit" (writes clean K/V) or "prefill".
        kv_update: this generation step starts a KV cycle: new noise, and exact under `protect="chunk"`.
        fresh_noise: this generation step starts from noise that the one before did not use.
        action: ego action per latent frame of the window [F, A] in physical units, held where not known yet.
        agents: how much of every latent cell the traffic covers, as far as it is known [F, P], 0 to 1.
        sigma: noise level of the pass.
        steps: denoising steps of a chunk.
        frame: the latent frame of the window that this chunk emits; None emits all of them.
    """

    rollout: int
    chunk: int
    step: int
    role: Literal["denoise", "commit", "prefill"]
    kv_update: bool = False
    fresh_noise: bool = False
    action: Tensor | None = None
    agents: Tensor | None = None
    sigma: float | None = None
    steps: int | None = None
    frame: int | None = None


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """How a rollout is driven.

    Attributes:
        kind: `receding`: every generation step denoises the whole window with the actions known so far and emits its
            own sub-chunk, one commit per window. `chunked`: the window is the chunk, commit after each. `shared`: the
            window is the chunk, but `kv_every` different chunks share one noise and only the first is committed.
            `sliding`: every generation step denoises a window of its own, which begins with the sub-chunk that it
            emits, from fresh noise; one commit per window.
        window: latent frames per window (sub-chunks of one latent each under `receding`).
        steps: denoising steps S.
        shift: flow-matching timestep shift of the schedule.
        kv_every: generation steps per KV cycle.
        noise: `per_cycle` keeps one noise tensor for a cycle, `fresh` draws one per generation step, `correlated`
            mixes both with weight `rho` on the shared one.
        rho: see `noise`.
        solver: `euler`, or `multistep`: the second-order Adams-Bashforth rule over the last two velocities.
        ahead: what a receding window takes the actions to be that are not known yet: `hold` the last one, or
            `extrapolate` its change. A plan given to `Session.step` comes first.
    """

    kind: Kind = "receding"
    window: int = 4
    steps: int = 4
    shift: float = 3.0
    kv_every: int = 4
    noise: Noise = "per_cycle"
    rho: float = 0.8
    solver: Literal["euler", "multistep"] = "euler"
    ahead: Literal["hold", "extrapolate"] = "hold"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"unknown protocol kind {self.kind!r}; choose one of {', '.join(KINDS)}.")
        if self.noise not in ("fresh", "per_cycle", "correlated"):
            raise ValueError(f"unknown noise {self.noise!r}; choose fresh, per_cycle or correlated.")
        if self.solver not in ("euler", "multistep"):
            raise ValueError(f"unknown solver {self.solver!r}; choose euler or multistep.")
        if self.ahead not in ("hold", "extrapolate"):
            raise ValueError(f"unknown ahead {self.ahead!r}; choose hold or extrapolate.")
        if self.steps < 1 or self.kv_every < 1:
            raise ValueError(f"steps ({self.steps}) and kv_every ({self.kv_every}) must be at least 1.")
        if not 0 <= self.rho <= 1:
            raise ValueError(f"rho is {self.rho}; it must lie in [0, 1].")
        if self.kind in ("receding", "sliding") and self.kv_every != self.window:
            raise ValueError(
                f"{self.kind} emits one latent of the window per generation step, so kv_every ({self.kv_every}) "
                f"must equal window ({self.window})."
            )
        if self.kind == "chunked" and self.kv_every != 1:
            raise ValueError(f"chunked commits after every chunk: kv_every must be 1, not {self.kv_every}.")

    @classmethod
    def named(cls, kind: str, **changes: object) -> Protocol:
        """The protocol called `kind` with its usual settings, e.g. `Protocol.named("chunked", steps=2)`."""
        presets: dict[str, dict[str, object]] = {
            "receding": {"kv_every": 4, "noise": "per_cycle"},
            "chunked": {"kv_every": 1, "noise": "fresh"},
            "shared": {"kv_every": 4, "noise": "per_cycle"},
            "sliding": {"kv_every": 4, "noise": "fresh"},
        }
        if kind not in presets:
            raise ValueError(f"unknown protocol kind {kind!r}; choose one of {', '.join(KINDS)}.")
        return cls(**{"kind": kind, **presets[kind], **changes})  # type: ignore[arg-type]

    @property
    def latents_per_chunk(self) -> int:
        """Latent frames that one generation step emits."""
        return 1 if self.kind in ("receding", "sliding") else self.window

    @property
    def sigmas(self) -> Tensor:
        """Noise levels of the Euler steps, [S + 1], from 1 to 0 with the timestep shift applied."""
        u = torch.linspace(1, 0, self.steps + 1)
        return self.shift * u / (1 + (self.shift - 1) * u)

    def describe(self) -> str:
        """One line for reports."""
        noise = {"per_cycle": "one noise per KV cycle", "fresh": "fresh noise per generation step"}.get(
            self.noise, f"noise correlated with rho={self.rho:g}"
        )
        solver = "multistep " if self.solver == "multistep" else ""
        ahead = ", actions ahead extrapolated" if self.ahead == "extrapolate" else ""
        return (
            f"{self.kind}: window of {self.window} latents, {self.latents_per_chunk} emitted per generation step, "
            f"{self.steps} denoising {solver}steps (shift {self.shift:g}), K/V committed every {self.kv_every}, {noise}"
            f"{ahead}"
        )
