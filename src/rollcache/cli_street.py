"""`rollcache street ...`: how the embedded world is made, step by step, and what it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from rollcache.street.evaluate.probe_training import ProbeTraining
from rollcache.street.train import CodecTraining, StudentTraining, TeacherTraining

if TYPE_CHECKING:
    from rollcache.street.codec import Codec
    from rollcache.street.dit import StreetDiT
    from rollcache.street.training import Trainer

WORK = Path("street-training")


@dataclass(frozen=True, kw_only=True)
class Info:
    """Facts about a weights file: checksum, sizes, how it was made. Verifies the file."""

    weights: Path | None = None
    """The file; default the weights that come with rollcache."""

    def run(self) -> int:
        """Run it; returns the exit code."""
        from rollcache.street.weights import describe

        facts = describe(self.weights)
        console = Console(highlight=False)
        console.print(f"{facts['file']}  {facts['bytes'] / 2**20:.1f} MiB  sha256 {facts['sha256']}", soft_wrap=True)
        for part in ("config", "facts"):
            for key, value in facts[part].items():
                console.print(f"  {key:<16} {value}", soft_wrap=True)
        return 0


@dataclass(frozen=True, kw_only=True)
class Data:
    """Render training clips and held-out clips. Clips that are there already are kept, so it can be resumed."""

    folder: Path = WORK / "data"
    """Where the clips go."""
    clips: int = 360
    """Training clips, scenarios in turn."""
    held_out: int = 12
    """Clips that are never trained on."""
    frames: int = 96
    """Pixel frames per clip, an even number."""

    def run(self) -> int:
        """Run it; returns the exit code."""
        from rollcache.street.data import HELD_OUT_SEED, render_clips

        if self.clips < 1 or self.held_out < 1 or self.frames < 2 or self.frames % 2:
            raise ValueError(
                f"--clips ({self.clips}) and --held-out ({self.held_out}) must be 1 or more, --frames ({self.frames}) "
                "even."
            )
        with _bar() as progress:
            for what, seeds in (
                ("held-out clips", range(HELD_OUT_SEED, HELD_OUT_SEED + self.held_out)),
                ("training clips", range(self.clips)),
            ):
                task = progress.add_task(what, total=len(seeds), note="")
                render_clips(
                    self.folder,
                    seeds,
                    self.frames,
                    lambda n, task=task: progress.update(task, completed=n),  # type: ignore[misc]
                )
        return 0


@dataclass(frozen=True, kw_only=True)
class TrainCodec:
    """Fit the linear encoder and train the decoder. Run it again to go on where it was stopped."""

    data: Path = WORK / "data"
    """Clips, made by: rollcache street data."""
    folder: Path = WORK
    """Training folder; the codec goes into its folder `codec`."""
    config: Annotated[CodecTraining, tyro.conf.arg(name="")] = field(default_factory=CodecTraining)

    def run(self) -> int:
        """Run it; returns the exit code."""
        from rollcache.street.train import train_codec

        return _train("codec", lambda watch: train_codec(self.data, self.folder / "codec", self.config, watch))


@dataclass(frozen=True, kw_only=True)
class TrainTeacher:
    """Train the transformer by flow matching. Run it again to go on where it was stopped."""

    data: Path = WORK / "data"
    """Clips, made by: rollcache street data."""
    folder: Path = WORK
    """Training folder that holds `codec`; the teacher goes into its folder `teacher`."""
    config: Annotated[TeacherTraining, tyro.conf.arg(name="")] = field(default_factory=TeacherTraining)

    def run(self) -> int:
        """Run it; returns the exit code."""
        from rollcache.street.train import train_teacher

        codec = _codec(self.folder)
        return _train(
            "teacher", lambda watch: train_teacher(self.data, codec, self.folder / "teacher", self.config, watch)
        )


@dataclass(frozen=True, kw_only=True)
class TrainStudent:
    """Distil the teacher to four steps. Run it again to go on where it was stopped."""

    data: Path = WORK / "data"
    """Clips, made by: rollcache street data."""
    folder: Path = WORK
    """Training folder that holds `codec` and `teacher`; the student goes into its folder `student`."""
    config: Annotated[StudentTraining, tyro.conf.arg(name="")] = field(default_factory=StudentTraining)

    def run(self) -> int:
        """Run it; returns the exit code."""
        from rollcache.street.train import train_student

        codec, teacher = _codec(self.folder), _teacher(self.folder)
        return _train(
            "student",
            lambda watch: train_student(self.data, codec, teacher, self.folder / "student", self.config, watch),
        )


@dataclass(frozen=True, kw_only=True)
class TrainProbe:
    """Train the probe that reads speed and yaw rate from frames, for street eval. Can be resumed like the others."""

    data: Path = WORK / "data"
    """Clips, made by: rollcache street data."""
    folder: Path = WORK
    """Training folder that holds `codec`; the probe goes into its folder `probe`."""
    config: Annotated[ProbeTraining, tyro.conf.arg(name="")] = field(default_factory=ProbeTraining)

    def run(self) -> int:
        """Run it; returns the exit code."""
        from rollcache.street.evaluate.probe_training import train_probe

        codec = _codec(self.folder)
        return _train("probe", lambda watch: train_probe(self.data, codec, self.folder / "probe", self.config, watch))


@dataclass(frozen=True, kw_only=True)
class Pack:
    """Make one checksummed weights file from a training folder."""

    out: Path
    """The file to write; its checksum goes beside it."""
    folder: Path = WORK
    """Training folder that holds `codec`, `teacher` and, once they are trained, `student` and `probe`."""

    def run(self) -> int:
        """Run it; returns the exit code."""
        import torch

        from rollcache.measure.provenance import revision
        from rollcache.street.lowrank import updates
        from rollcache.street.weights import pack

        codec, model = _codec(self.folder), _teacher(self.folder)
        student = updates(_average(self.folder, "student")) if _trained(self.folder, "student") else None
        probe = _average(self.folder, "probe") if _trained(self.folder, "probe") else None
        facts: dict[str, Any] = {"version": version("rollcache"), "revision": revision()}
        for part in ("codec", "teacher", "student", "probe"):
            checkpoint = self.folder / part / "checkpoint.pt"
            if checkpoint.exists():
                state = torch.load(checkpoint, weights_only=True)
                facts[part] = {
                    "steps": state["step"],
                    "minutes": round(state["seconds"] / 60, 1),
                    "loss": round(state["loss"], 5),
                    "recipe": state.get("recipe", {}),
                }
        digest = pack(self.out, model, codec, facts, student, probe)
        Console(highlight=False).print(
            f"{self.out}  {self.out.stat().st_size / 2**20:.1f} MiB  sha256 {digest}", soft_wrap=True
        )
        return 0


def _train(what: str, run: Callable[[Callable[[Trainer], None]], Trainer]) -> int:
    """Train with a live line: share of the budget, step, loss."""
    with _bar() as progress:
        task = progress.add_task(what, total=1.0, note="starting")

        def watch(trainer: Trainer) -> None:
            progress.update(task, completed=trainer.progress, note=f"step {trainer.step}, loss {trainer.loss:.4f}")

        try:
            trainer = run(watch)
        except KeyboardInterrupt:
            progress.stop()
            Console(stderr=True).print(
                f"interrupted: the {what} is saved; run the same command to go on", highlight=False
            )
            return 130
    Console(highlight=False).print(
        f"{what}: {trainer.step} steps, {trainer.seconds / 60:.1f} minutes, loss {trainer.loss:.4f}, "
        f"{trainer.checkpoint}",
        soft_wrap=True,
    )
    return 0


def _codec(folder: Path) -> Codec:
    """The trained codec of a training folder."""
    from rollcache.street.codec import Codec

    average = _average(folder, "codec")
    codec = Codec(average["basis"].shape[0])
    codec.load_state_dict(average)
    return codec


def _teacher(folder: Path) -> StreetDiT:
    """The trained teacher of a training folder."""
    from rollcache.street.dit import DiTConfig, StreetDiT

    average = _average(folder, "teacher")
    model = StreetDiT(DiTConfig(channels=average["head.weight"].shape[0]))
    model.load_state_dict(average)
    return model


def _average(folder: Path, stage: str) -> dict[str, Any]:
    from rollcache.street.weights import average_of

    if not _trained(folder, stage):
        raise ValueError(f"no {stage} in {folder}; train it first: rollcache street train {stage} --folder {folder}")
    return average_of(folder / stage)


def _trained(folder: Path, stage: str) -> bool:
    return (folder / stage / "checkpoint.pt").exists()


def _bar() -> Progress:
    return Progress(
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=28),
        TextColumn("{task.percentage:>3.0f}%"),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
