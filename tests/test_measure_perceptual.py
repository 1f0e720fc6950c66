"""FLIP, LPIPS and ST-LPIPS: parity with the packages that define them, and honest absence."""

import builtins
import dataclasses
import hashlib
import importlib.metadata

import numpy as np
import pytest
import torch
from torch import nn

from rollcache.measure import FrameError, Metric, WeightsError, flip, lpips, stlpips
from rollcache.measure.learned import FeatureDistance, fill
from rollcache.measure.lpips import ENVIRONMENT, NETS, backbone, bundled_heads, load
from rollcache.measure.metric import stride_for
from rollcache.measure.stlpips import backbone as stlpips_backbone

# Values of the `lpips` package 0.1.4 (torchvision 0.28 backbones, LPIPS v0.1 heads) for the backbone weights of
# `seeded` and the images of `images`, float32.
PACKAGE = {
    "alex": (0.0007867147796787322, 0.03348894417285919),
    "vgg16": (0.001145765301771462, 0.04776269197463989),
    "squeeze": (0.0021418884862214327, 0.05255025625228882),
}
# The same of `stlpips-pytorch` 0.0.2, variant "shift_tolerant", for the weights of `stlpips_state`.
STLPIPS_PACKAGE = (0.0027217341121286154, 0.16159743070602417)


def seeded(features: nn.Sequential, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        key: torch.randn(value.shape, generator=generator) * ((2 / value[0].numel()) ** 0.5 if value.ndim > 1 else 0.1)
        for key, value in features.state_dict().items()
    }


def images() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(2, 64, 72, 3, generator=generator)
    sd = torch.tensor([0.02, 0.2]).view(2, 1, 1, 1)
    return x, (x + sd * torch.randn(x.shape, generator=generator)).clamp(0, 1)


def frames(x: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"front": x.unsqueeze(1)}


@pytest.fixture
def no_weights(tmp_path, monkeypatch):
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    (tmp_path / "hub" / "checkpoints").mkdir(parents=True)
    return tmp_path / "hub" / "checkpoints"


@pytest.mark.parametrize("net", NETS)
def test_lpips_equals_the_package(net):
    features = backbone(net)
    model = FeatureDistance(fill(features, seeded(features)), NETS[net].taps, bundled_heads(net))
    x, y = images()
    assert model(x, y).tolist() == pytest.approx(PACKAGE[net], rel=1e-5)
    assert model(x, x).tolist() == [0.0, 0.0]
    torch.testing.assert_close(model(x, y), model(y, x))


@pytest.mark.parametrize("net", NETS)
def test_smallest_camera_is_the_one_the_layers_allow(net):
    features = backbone(net)
    small = NETS[net].smallest
    assert features(torch.zeros(1, 3, small, small)).shape[-1] >= 1
    with pytest.raises(RuntimeError):
        features(torch.zeros(1, 3, small - 1, small - 1))
    test = frames(torch.rand(1, small - 1, 64, 3))
    with pytest.raises(ValueError, match=f"LPIPS {net} needs cameras of {small} pixels a side; too small: front"):
        lpips(test, test, net=net)


def test_bundled_heads_are_those_of_lpips_v01():
    sizes = {net: [len(head) for head in bundled_heads(net)] for net in NETS}
    assert sizes == {
        "alex": [64, 192, 384, 256, 256],
        "vgg16": [64, 128, 256, 512, 512],
        "squeeze": [64, 128, 256, 384, 384, 512, 512],
    }
    digest = hashlib.sha256()
    for net in NETS:
        for head in bundled_heads(net):
            assert (head >= 0).all()
            digest.update(head.numpy().tobytes())
    assert digest.hexdigest() == "cda52fd11bed15c09eef38d09f80be30b7fa056f839218b873ae54edf2d4a5ea"


def test_without_weights_there_is_no_value_but_a_reason(no_weights):
    test = frames(images()[0])
    found = lpips(test, test, net="squeeze")
    assert found.value is None
    assert str(found) == "n/a (no weights)"
    assert "squeezenet1_1-b8a52dc0.pth" in found.reason
    assert "--lpips-weights" in found.reason
    assert ENVIRONMENT in found.reason
    written = found.to_dict()
    assert written["value"] is None
    assert written["net"] == "squeeze"


def variants(net: str) -> dict[str, dict[str, torch.Tensor]]:
    state = seeded(backbone(net))
    heads = {f"lin{i}.model.1.weight": head.view(1, -1, 1, 1) for i, head in enumerate(bundled_heads(net))}
    return {
        "torchvision": {**{f"features.{k}": v for k, v in state.items()}, "classifier.1.weight": torch.zeros(2)},
        "features": state,
        "lpips": {**{f"net.slice1.{k}": v for k, v in state.items()}, **heads, "scaling_layer.shift": torch.zeros(3)},
    }


@pytest.mark.parametrize("layout", ["torchvision", "features", "lpips"])
@pytest.mark.parametrize("how", ["argument", "environment", "hub"])
def test_weights_are_found_in_every_place_and_layout(no_weights, monkeypatch, tmp_path, layout, how):
    path = tmp_path / "mine.pth"
    torch.save(variants("squeeze")[layout], path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    x, y = images()
    argument = path if how == "argument" else None
    if how == "environment":
        monkeypatch.setenv(ENVIRONMENT, str(path))
    if how == "hub":
        name = f"squeezenet1_1-{digest[:8]}.pth"
        path.rename(no_weights / name)
        monkeypatch.setitem(NETS, "squeeze", dataclasses.replace(NETS["squeeze"], files=(name,)))
    found = lpips(frames(x), frames(y), net="squeeze", weights=argument)
    assert found.value == pytest.approx(np.mean(PACKAGE["squeeze"]), rel=1e-5)
    assert found.settings["weights_sha256"] == digest
    assert found.frames == 2
    assert found.to_dict()["cameras"] == {"front": pytest.approx(np.mean(PACKAGE["squeeze"]), rel=1e-5)}


def test_heads_of_a_full_file_are_used(tmp_path):
    state = variants("squeeze")["lpips"]
    doubled = {k: v * 2 if k.startswith("lin") else v for k, v in state.items()}
    torch.save(doubled, tmp_path / "full.pth")
    x, y = images()
    found = lpips(frames(x), frames(y), net="squeeze", weights=tmp_path / "full.pth")
    assert found.value == pytest.approx(2 * np.mean(PACKAGE["squeeze"]), rel=1e-5)


def test_a_corrupt_download_is_reported_not_used(no_weights):
    (no_weights / "squeezenet1_1-b8a52dc0.pth").write_bytes(b"half a file")
    found = load("squeeze")
    assert isinstance(found, Metric)
    assert str(found) == "n/a (bad weights)"
    assert "squeezenet1_1-b8a52dc0.pth is corrupt" in found.reason


def test_files_that_were_asked_for_must_be_good(tmp_path):
    with pytest.raises(WeightsError, match=r"cannot read weights file .*none\.pth"):
        load("alex", tmp_path / "none.pth")
    (tmp_path / "noise.pth").write_bytes(b"noise")
    with pytest.raises(WeightsError, match=r"noise\.pth is not a readable weights file"):
        load("alex", tmp_path / "noise.pth")
    torch.save(variants("squeeze")["torchvision"], tmp_path / "squeeze.pth")
    with pytest.raises(WeightsError, match=r"squeeze\.pth is not for LPIPS alex: another network"):
        load("alex", tmp_path / "squeeze.pth")
    torch.save({"0.weight": 3}, tmp_path / "odd.pth")
    with pytest.raises(WeightsError, match="holds no state dict of tensors"):
        load("alex", tmp_path / "odd.pth")


def test_weights_with_code_inside_are_not_run(tmp_path):
    class Trap:
        def __reduce__(self):
            return (builtins.open, (str(tmp_path / "ran"), "w"))

    torch.save({"0.weight": Trap()}, tmp_path / "trap.pth")
    with pytest.raises(WeightsError, match="not a readable weights file"):
        load("alex", tmp_path / "trap.pth")
    assert not (tmp_path / "ran").exists()


def test_unknown_net_is_named():
    test = frames(images()[0])
    with pytest.raises(ValueError, match="unknown LPIPS net 'resnet'; choose from alex, vgg16, squeeze"):
        lpips(test, test, net="resnet")


def test_flip_is_the_evaluators_mean_and_zero_for_equal_frames():
    from flip_evaluator import evaluate

    x, y = images()
    found = flip(frames(x), frames(y), pixels_per_degree=20)
    expected = [
        evaluate(b.numpy(), a.numpy(), "LDR", applyMagma=False, parameters={"ppd": 20})[1]
        for a, b in zip(x, y, strict=True)
    ]
    assert found.value == pytest.approx(np.mean(expected), rel=1e-6)
    assert found.settings == {"pixels_per_degree": 20, "range": "LDR", "stride": 1}
    assert flip(frames(x), frames(x)).value == 0.0


def test_flip_takes_every_kth_frame_and_says_so():
    reference = frames(torch.zeros(10, 16, 16, 3))
    test = frames(torch.zeros(10, 16, 16, 3))
    test["front"][[1, 2, 4, 5, 7, 8]] = 1.0  # all but every third frame
    found = flip(test, reference, at_most=4)
    assert (found.value, found.frames, found.settings["stride"]) == (0.0, 4, 3)
    assert flip(test, reference).value > 0.1
    with pytest.raises(ValueError, match="at_most must be 1 or more"):
        flip(test, reference, at_most=0)


def test_overshoot_of_a_decoder_does_not_count():
    white = frames(torch.ones(1, 16, 16, 3))
    assert flip({"front": white["front"] + 0.3}, white).value == 0.0


def test_flip_refuses_bad_input():
    x = images()[0]
    with pytest.raises(ValueError, match="pixels_per_degree must be positive, got 0"):
        flip(frames(x), frames(x), pixels_per_degree=0)
    with pytest.raises(FrameError, match="test has shape"):
        flip(frames(x), frames(x[:1]))


def test_flip_without_its_package_has_no_value(monkeypatch):
    real = builtins.__import__

    def refuse(name, *rest, **named):
        if name == "flip_evaluator":
            raise ImportError(name)
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", refuse)
    x = images()[0]
    found = flip(frames(x), frames(x))
    assert str(found) == "n/a (flip-evaluator missing)"
    assert "rollcache[bench]" in found.reason


@pytest.mark.parametrize(("count", "most", "stride"), [(1, 48, 1), (48, 48, 1), (49, 48, 2), (97, 48, 3), (10, 1, 10)])
def test_stride_gives_at_most_that_many(count, most, stride):
    assert stride_for(count, most) == stride
    assert len(range(0, count, stride)) <= most


def stlpips_state() -> dict[str, torch.Tensor]:
    features = stlpips_backbone()
    state = seeded(features)
    state = {k: torch.full_like(v, 1 / 9) if k.endswith("filt") else v for k, v in state.items()}
    heads = {f"lin{i}.model.1.weight": torch.full((1, c, 1, 1), 0.5) for i, c in enumerate((64, 192, 384, 256, 256))}
    return {**{f"net.slice1.{k}": v for k, v in state.items()}, **heads}


def test_stlpips_equals_the_package_on_a_weights_file(tmp_path):
    path = tmp_path / "alex_shift_tolerant.pth"
    torch.save(stlpips_state(), path)
    x, y = images()
    found = stlpips(frames(x), frames(y), weights=path)
    assert found.value == pytest.approx(np.mean(STLPIPS_PACKAGE), rel=1e-5)
    assert found.stitched == pytest.approx(found.value, rel=1e-5)  # one camera: the mosaic is the picture
    assert stlpips(frames(x), frames(x), weights=path).value == 0.0
    assert found.settings["weights_sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    shapes = [x.shape[-1] for x in _sizes(stlpips_backbone(), 64)]
    assert shapes == [30, 15, 8, 8, 8]


def _sizes(features: nn.Sequential, size: int) -> list[torch.Tensor]:
    h, found = torch.zeros(1, 3, size, size), []
    for layer in features:
        h = layer(h)
        if isinstance(layer, nn.ReLU):
            found.append(h)
    return found


def test_stlpips_without_weights_or_with_others_says_so(tmp_path, monkeypatch):
    x = images()[0]

    def nothing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", nothing)
    found = stlpips(frames(x), frames(x))
    assert str(found) == "n/a (no weights)"
    assert "rollcache[stlpips]" in found.reason
    torch.save({k: v for k, v in stlpips_state().items() if not k.startswith("lin")}, tmp_path / "headless.pth")
    with pytest.raises(WeightsError, match=r"headless\.pth is not for ST-LPIPS: it has 0 heads"):
        stlpips(frames(x), frames(x), weights=tmp_path / "headless.pth")
    torch.save(seeded(backbone("alex")), tmp_path / "plain.pth")
    with pytest.raises(WeightsError, match=r"plain\.pth is not for ST-LPIPS: another network"):
        stlpips(frames(x), frames(x), weights=tmp_path / "plain.pth")
