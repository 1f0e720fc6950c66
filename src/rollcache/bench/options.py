"""Options that the benchmark commands share, and the world they make of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from rollcache.bench.takes import Injection, TakePlan, plan_take
from rollcache.street.protocol import Protocol

if TYPE_CHECKING:
    from rollcache.street.world import World

Scenario = Literal["urban", "highway", "u-turn"]
Kind = Literal["receding", "chunked", "shared", "sliding"]
Stage = Literal["student", "teacher"]
PolicyName = Literal["xcache", "xcache-paper", "window-reuse", "replan", "none"]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Where and on what it runs.

    Attributes:
        weights: weights of the street world; default those that come with rollcache.
        stage: which transformer of them: the student needs 4 denoising steps, the teacher many (--steps 50).
        dtype: precision of matrix products; `auto` is bfloat16 where the processor has it.
        device: torch device.
        threads: threads of torch; default its own choice.
    """

    weights: Path | None = None
    stage: Stage = "student"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    device: str = "cpu"
    threads: int | None = None

    def world(self) -> World:
        """Load the world and set the threads.

        Raises:
            WeightsError: the weights are missing or damaged.
            ValueError: a device or a number of threads that this machine does not have.
        """
        import torch

        from rollcache.street.world import World

        if self.threads is not None:
            if self.threads < 1:
                raise ValueError(f"--threads is {self.threads}; it must be 1 or more.")
            torch.set_num_threads(self.threads)
        try:
            torch.empty(1, device=self.device)
        except (RuntimeError, AssertionError) as error:
            raise ValueError(f"--device {self.device}: {str(error).splitlines()[0]}") from None
        return World.load(self.weights, dtype=self.dtype, device=self.device, stage=self.stage)

    def reload(self, dtype: str) -> World:
        """The same weights in another precision."""
        from rollcache.street.world import World

        return World.load(self.weights, dtype=dtype, device=self.device, stage=self.stage)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Driving:
    """What is driven.

    Attributes:
        scenario: the scene group.
        actions: a recorded drive: CSV with t_s, speed_mps, yaw_rate_rps at 12 rows a second. Default: the scenario's
            scripted drive.
        chunks: generation steps.
        seed: of scene and noise. Scenes are held out from training.
        protocol: how the rollout is driven, see docs/measuring.md.
        steps: denoising steps.
        brake_at: inject a full stop at this chunk (choose one in the middle of a cycle: 6 is, with 4 chunks a cycle).
        steer_at: inject a jump of the yaw rate at this chunk.
    """

    scenario: Scenario = "u-turn"
    actions: Path | None = None
    chunks: int = 33
    seed: int = 0
    protocol: Kind = "receding"
    steps: int = 4
    brake_at: int | None = None
    steer_at: int | None = None

    def rules(self) -> Protocol:
        """The rollout protocol."""
        return Protocol.named(self.protocol, steps=self.steps)

    def plan(self) -> TakePlan:
        """Check all of it and read the drive; nothing is drawn.

        Raises:
            ValueError: what is wrong (`DriveError` for a recorded drive).
            OSError: the drive cannot be read.
        """
        asked = (("brake", self.brake_at), ("steer", self.steer_at))
        return plan_take(
            self.scenario,
            seed=self.seed,
            chunks=self.chunks,
            protocol=self.rules(),
            actions=self.actions,
            injections=tuple(Injection(kind, chunk) for kind, chunk in asked if chunk is not None),
        )


FlatMachine = Annotated[Machine, tyro.conf.arg(name="")]
FlatDriving = Annotated[Driving, tyro.conf.arg(name="")]
