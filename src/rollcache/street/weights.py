"""The weights that ship: one float16 safetensors file with its SHA-256 beside it.

It holds the codec, the many-step teacher, the low-rank update that makes the four-step student of the teacher, and,
where it was trained, the inverse-dynamics probe that reads actions back.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rollcache.street.codec import Codec
from rollcache.street.dit import DiTConfig, StreetDiT
from rollcache.street.evaluate.probe import HISTORY, Probe
from rollcache.street.lowrank import merge
from rollcache.street.training import UNREADABLE

Stage = Literal["student", "teacher"]
DEFAULT = Path(__file__).parent / "checkpoints" / "street-v2.safetensors"


class WeightsError(ValueError):
    """A weights file is missing, damaged, or made for another model."""


class NoProbeError(WeightsError):
    """A weights file holds no inverse-dynamics probe."""


def pack(
    path: Path,
    model: StreetDiT,
    codec: Codec,
    facts: dict[str, Any],
    student: dict[str, Tensor] | None = None,
    probe: dict[str, Tensor] | None = None,
) -> str:
    """Write model and codec as float16 to `path` with `facts` (how it was made); returns the SHA-256.

    The linear part of the codec stays float32: it defines the latent space. `student` are the low-rank factors that
    make the few-step student of `model`; without them `model` is all there is. `probe` is the state of the
    inverse-dynamics probe.
    """
    tensors: dict[str, Tensor] = {f"dit.{k}": v.half() for k, v in model.state_dict().items()}
    tensors |= {f"student.{k}": v.half() for k, v in (student or {}).items()}
    tensors |= {f"probe.{k}": v.half() for k, v in (probe or {}).items()}
    for key, value in codec.state_dict().items():
        linear = key in ("mean", "basis", "scale")
        tensors[f"codec.{key}"] = value.float() if linear else value.half()
    meta = {"config": json.dumps(asdict(model.config)), "facts": json.dumps(facts)}
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    try:
        save_file({k: v.contiguous() for k, v in tensors.items()}, part, metadata=meta)
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{path} could not be written: {error}") from error
    part.chmod(0o644)  # safetensors makes it private; installed packages are read by everyone
    digest = _sha256(part)
    part.replace(path)
    _digest_path(path).write_text(f"{digest}  {path.name}\n")
    return digest


def load(path: Path | None = None, stage: Stage = "student") -> tuple[StreetDiT, Codec]:
    """Read the shipped weights, or those of `path`, as float32 modules; verifies the checksum first.

    Raises:
        WeightsError: the file is missing, damaged or made for another model.
        ValueError: there is no such stage.
    """
    if stage not in ("student", "teacher"):
        raise ValueError(f"the stage is {stage!r}; choose student or teacher.")
    path = path or DEFAULT
    _verify(path)
    try:
        with safe_open(path, framework="pt") as file:
            config = DiTConfig(**json.loads((file.metadata() or {})["config"]))
            tensors = {k: file.get_tensor(k).float() for k in file.keys()}  # noqa: SIM118  (not a dict)
    except (SafetensorError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise WeightsError(f"{path} is no weights file of the street world ({error}).") from error
    if bad := next((k for k, v in tensors.items() if not torch.isfinite(v).all()), None):
        raise WeightsError(f"{path} holds numbers that are not finite, in {bad}.")
    model, codec = StreetDiT(config), Codec(config.channels)
    for module, prefix in ((model, "dit."), (codec, "codec.")):
        part = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
        try:
            module.load_state_dict(part)
        except RuntimeError as error:
            raise WeightsError(f"{path} does not fit {type(module).__name__}: {error}") from error
    if stage == "student":
        try:
            merge(model, {k.removeprefix("student."): v for k, v in tensors.items() if k.startswith("student.")})
        except ValueError as error:
            raise WeightsError(f"{path}: {error}") from error
    return model, codec


def load_probe(path: Path | None = None) -> Probe:
    """Read the inverse-dynamics probe of the shipped weights, or of `path`, as a float32 module.

    Raises:
        NoProbeError: the file has no probe.
        WeightsError: the file is missing or damaged, or its probe has other sizes.
    """
    path = path or DEFAULT
    _verify(path)
    try:
        with safe_open(path, framework="pt") as file:
            names = [k for k in file.keys() if k.startswith("probe.")]  # noqa: SIM118  (not a dict)
            state = {k.removeprefix("probe."): file.get_tensor(k).float() for k in names}
    except SafetensorError as error:
        raise WeightsError(f"{path} is no weights file of the street world ({error}).") from error
    if not state:
        raise NoProbeError(f"{path} has no probe; train one and pack again: rollcache street train probe --help")
    try:
        probe = Probe(state["stem.weight"].shape[1] // HISTORY)
        probe.load_state_dict(state)
    except (KeyError, IndexError, RuntimeError) as error:
        raise WeightsError(f"{path} does not fit Probe: {error}") from error
    return probe.eval().requires_grad_(False)


def warm_start(model: StreetDiT, path: Path) -> list[str]:
    """Take from a weights file all that fits by name and shape; returns the names of what the model keeps as it is."""
    _verify(path)
    mine = model.state_dict()
    with safe_open(path, framework="pt") as file:
        names = {k.removeprefix("dit."): k for k in file.keys() if k.startswith("dit.")}  # noqa: SIM118
        found = {k: file.get_tensor(name).float() for k, name in names.items() if k in mine}
    fits = {k: v for k, v in found.items() if v.shape == mine[k].shape}
    model.load_state_dict(fits, strict=False)
    return [k for k in mine if k not in fits]


def describe(path: Path | None = None) -> dict[str, Any]:
    """Facts stored with a weights file: name, SHA-256, sizes, how it was made."""
    path = path or DEFAULT
    _verify(path)
    try:
        with safe_open(path, framework="pt") as file:
            meta = file.metadata() or {}
        config, facts = (json.loads(meta[key]) for key in ("config", "facts"))
    except (SafetensorError, KeyError, json.JSONDecodeError) as error:
        raise WeightsError(f"{path} is no weights file of the street world ({error}).") from error
    if not isinstance(config, dict) or not isinstance(facts, dict):
        raise WeightsError(f"{path} is no weights file of the street world (its config or facts are no object).")
    return {
        "file": path.name,
        "sha256": _sha256(path),
        "bytes": path.stat().st_size,
        "config": config,
        "facts": facts,
    }


def _verify(path: Path) -> None:
    if not path.exists():
        raise WeightsError(
            f"no weights at {path}; reinstall rollcache, or train your own: rollcache street train --help"
        )
    recorded = _digest_path(path)
    if not recorded.exists():
        raise WeightsError(f"{recorded.name} is missing beside {path}; the file cannot be verified.")
    want, got = recorded.read_text().partition(" ")[0].strip(), _sha256(path)
    if want != got:
        raise WeightsError(
            f"{path} is damaged: its SHA-256 is {got[:12]}..., recorded is {want[:12]}...; reinstall rollcache."
        )


def _digest_path(path: Path) -> Path:
    return path.with_suffix(".sha256")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def average_of(folder: Path) -> dict[str, Tensor]:
    """The averaged weights of a training folder's checkpoint."""
    path = folder / "checkpoint.pt"
    try:
        average: dict[str, Tensor] = torch.load(path, weights_only=True)["average"]
    except (*UNREADABLE, KeyError) as error:
        raise WeightsError(f"{path} is damaged ({str(error).splitlines()[0]}); train that stage again.") from error
    return average
