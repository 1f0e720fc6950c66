"""The training loop that codec, teacher and student share: budget, schedule, checkpoints, resume, log, progress."""

from __future__ import annotations

import json
import math
import pickle
import struct
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

UNREADABLE = (RuntimeError, EOFError, struct.error, pickle.UnpicklingError)  # what torch.load says of damaged files


class NonFiniteLossError(ValueError):
    """The loss became NaN or infinite; the last good checkpoint is kept."""


class CheckpointError(ValueError):
    """A checkpoint could not be written, or belongs to something else."""


class Trainer:
    """Runs `step_fn` until a budget of minutes or steps is used up, saving every `save_seconds`.

    The learning rate is constant and falls linearly to zero over the last `decay` share of the budget. A run that is
    started again with the same folder resumes from its last checkpoint. The exponential average of the weights is what
    gets shipped, with the `recipe` (a dataclass of settings) that made it.
    """

    def __init__(
        self,
        folder: Path,
        module: nn.Module,
        optimizers: list[torch.optim.Optimizer],
        *,
        minutes: float,
        steps: int = 10**9,
        warmup: int = 50,
        decay: float = 0.4,
        ema: float = 0.998,
        clip: float = 1.0,
        save_seconds: float = 180.0,
        seed: int = 0,
        stamp: str = "",
        recipe: Any = None,
    ) -> None:
        if not minutes > 0 or steps < 1:
            raise ValueError(f"a budget of {minutes:g} minutes and {steps} steps is none; give more than 0 of both.")
        self.folder, self.module, self.optimizers = folder, module, optimizers
        settings = {} if recipe is None else asdict(recipe)
        self.recipe = {k: v.name if isinstance(v, Path) else str(v) for k, v in settings.items()}
        self.stamp = stamp  # what the checkpoint depends on, such as the codec; another one is refused
        self.minutes, self.steps, self.warmup, self.decay = minutes, steps, warmup, decay
        self.ema_rate, self.clip, self.save_seconds = ema, clip, save_seconds
        self.generator = torch.Generator().manual_seed(seed)
        self.base_lr = [[g["lr"] for g in o.param_groups] for o in optimizers]
        self.step, self.seconds, self.loss = 0, 0.0, math.nan
        self.average = {k: v.detach().clone().float() for k, v in module.state_dict().items()}
        folder.mkdir(parents=True, exist_ok=True)
        self.checkpoint = folder / "checkpoint.pt"
        if self.checkpoint.exists():
            self._load()

    @property
    def progress(self) -> float:
        """Share of the budget used, 0 to 1."""
        return min(1.0, max(self.seconds / (60 * self.minutes), self.step / self.steps))

    def run(
        self,
        step_fn: Callable[[torch.Generator], Tensor],
        *,
        evaluate: Callable[[], float] | None = None,
        every: int = 200,
        on_step: Callable[[Trainer], None] | None = None,
    ) -> None:
        """Train. `step_fn(generator)` returns one loss; `evaluate` a held-out loss, every `every` steps."""
        parameters = [p for p in self.module.parameters() if p.requires_grad]
        last_save = time.monotonic()
        try:
            while self.progress < 1:
                began = time.monotonic()
                scale = min(1.0, (self.step + 1) / self.warmup, max(0.0, 1 - self.progress) / self.decay)
                for optimizer, rates in zip(self.optimizers, self.base_lr, strict=True):
                    for group, rate in zip(optimizer.param_groups, rates, strict=True):
                        group["lr"] = rate * scale
                loss = step_fn(self.generator)
                value = float(loss.detach())
                if not math.isfinite(value):
                    raise NonFiniteLossError(
                        f"loss is {value} at step {self.step}; the last good checkpoint is {self.checkpoint}."
                    )
                loss.backward()
                norm = nn.utils.clip_grad_norm_(parameters, self.clip)
                for optimizer in self.optimizers:
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)
                self._update_average()
                self.step += 1
                self.loss = value if math.isnan(self.loss) else 0.98 * self.loss + 0.02 * value
                self.seconds += time.monotonic() - began
                if self.step % every == 0:
                    self._log(float(norm), evaluate() if evaluate else math.nan)
                if time.monotonic() - last_save > self.save_seconds:
                    self.save()
                    last_save = time.monotonic()
                if on_step:
                    on_step(self)
        except KeyboardInterrupt:
            self.save()
            raise
        self.save()

    def averaged(self) -> dict[str, Tensor]:
        """The averaged weights, as a state dict of the module's dtypes."""
        like = self.module.state_dict()
        return {k: v.to(like[k].dtype) for k, v in self.average.items()}

    def save(self) -> None:
        """Write the checkpoint atomically; raises CheckpointError when it cannot be, the one before is kept then."""
        part = self.checkpoint.with_suffix(".part")
        state: dict[str, Any] = {
            "module": self.module.state_dict(),
            "average": self.average,
            "optimizers": [o.state_dict() for o in self.optimizers],
            "step": self.step,
            "seconds": self.seconds,
            "loss": self.loss,
            "generator": self.generator.get_state(),
            "stamp": self.stamp,
            "recipe": self.recipe,
        }
        try:
            torch.save(state, part)
            part.replace(self.checkpoint)
        except (OSError, RuntimeError) as error:  # the writer of torch reports a full disk as a RuntimeError
            part.unlink(missing_ok=True)
            kept = f"{self.checkpoint} of an earlier step is kept" if self.checkpoint.exists() else "nothing is saved"
            raise CheckpointError(f"step {self.step} could not be saved to {self.folder} ({error}); {kept}.") from error

    def _load(self) -> None:
        try:
            state = torch.load(self.checkpoint, weights_only=True)
            if state.get("stamp", self.stamp) != self.stamp:
                raise ValueError(f"it was made with {state['stamp']}, this run uses {self.stamp}")
            self.module.load_state_dict(state["module"])
            self.average = state["average"]
            for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
        except (*UNREADABLE, KeyError, ValueError) as error:
            raise CheckpointError(
                f"{self.checkpoint} does not fit this training run ({str(error).splitlines()[0]}); "
                "choose another folder, or remove it."
            ) from error
        self.step, self.seconds, self.loss = state["step"], state["seconds"], state["loss"]
        self.generator.set_state(state["generator"])

    @torch.no_grad()
    def _update_average(self) -> None:
        rate = min(self.ema_rate, (1 + self.step) / (10 + self.step))
        for key, value in self.module.state_dict().items():
            self.average[key].lerp_(value.float(), 1 - rate)

    def _log(self, norm: float, held_out: float) -> None:
        row = {
            "step": self.step,
            "minutes": round(self.seconds / 60, 2),
            "loss": round(self.loss, 5),
            "held_out": None if math.isnan(held_out) else round(held_out, 5),
            "gradient_norm": round(norm, 4),
        }
        with (self.folder / "log.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")


def muon_and_adamw(module: nn.Module, lr: float, weight_decay: float = 0.01) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside blocks, AdamW for everything else, both at learning rate `lr`."""
    matrices, rest = [], []
    for name, p in module.named_parameters():
        (matrices if p.ndim == 2 and "blocks." in name else rest).append(p)
    muon = torch.optim.Muon(matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.98), weight_decay=0.0)]
