"""The street transformer, codec and sampler: causality, K/V hygiene, protocols, determinism."""

from __future__ import annotations

import copy

import pytest
import torch

from rollcache.street.codec import Codec
from rollcache.street.data import hold, latent_actions, mirror_frames
from rollcache.street.dit import DiTConfig, StreetDiT, WindowKV
from rollcache.street.protocol import Protocol
from rollcache.street.rig import CELLS, RIG
from rollcache.street.scenery import ATTRIBUTES, Scenery
from rollcache.street.world import Session, Start, World

WINDOW = 4
Z = 24


def random_model(seed: int = 0, depth: int = 4) -> StreetDiT:
    torch.manual_seed(seed)
    model = StreetDiT(DiTConfig(width=48, heads=3, depth=depth, rank=16)).eval()
    for p in model.parameters():
        if not p.any():
            torch.nn.init.normal_(p, std=0.05)
    return model


def random_codec() -> Codec:
    codec = Codec(Z)
    codec.basis.copy_(torch.linalg.qr(torch.randn(384, Z, generator=torch.Generator().manual_seed(0)))[0].T)
    codec.mean.fill_(0.5)
    return codec


@pytest.fixture(scope="module")
def world() -> World:
    return World(random_model(), random_codec(), dtype="float32")


@pytest.fixture(scope="module")
def start() -> Start:
    generator = torch.Generator().manual_seed(1)
    return Start(torch.randn(2 * WINDOW, CELLS, Z, generator=generator), torch.zeros(2 * WINDOW, 4))


def inputs(windows: int, seed: int = 0) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {
        "z": torch.randn(1, windows * WINDOW, CELLS, Z, generator=g),
        "t": torch.rand(1, windows, generator=g),
        "action": torch.randn(1, windows * WINDOW, 4, generator=g),
        "context": torch.randn(1, windows, CELLS, Z, generator=g),
        "known": torch.ones(1, windows),
        "time": WINDOW * torch.arange(windows).float()[None],
    }


def test_training_pass_over_windows_equals_committing_them_one_by_one() -> None:
    model, x = random_model(), inputs(3)
    x["t"][:, :2] = 0
    with torch.inference_mode():
        together = model(**x)
        kv = WindowKV(2)
        for w in range(3):
            part = {
                k: v[:, w * WINDOW : (w + 1) * WINDOW] if k in ("z", "action") else v[:, w : w + 1]
                for k, v in x.items()
            }
            alone = model(**part, kv=kv, commit=w < 2)
            torch.testing.assert_close(alone, together[:, w * WINDOW : (w + 1) * WINDOW], atol=2e-5, rtol=1e-4)


def test_a_window_never_sees_a_later_one() -> None:
    model, x = random_model(), inputs(3)
    y = copy.deepcopy(x)
    y["z"][:, 2 * WINDOW :] += 1
    with torch.inference_mode():
        a, b = model(**x), model(**y)
    assert torch.equal(a[:, : 2 * WINDOW], b[:, : 2 * WINDOW])
    assert not torch.equal(a[:, 2 * WINDOW :], b[:, 2 * WINDOW :])


def test_only_relative_time_matters() -> None:
    model, x = random_model(), inputs(2)
    y = {**x, "time": x["time"] + 40}
    with torch.inference_mode():
        torch.testing.assert_close(model(**x), model(**y), atol=1e-4, rtol=1e-3)


def test_denoising_reads_the_kv_cache_and_never_writes_it() -> None:
    model, kv, x = random_model(), WindowKV(2), inputs(1)
    with torch.inference_mode():
        model(**x, kv=kv, commit=True)
        before = copy.deepcopy(kv.entries)
        model(**inputs(1, seed=5), kv=kv)
    assert len(kv.entries) == len(before) == 1 and not kv.pending
    for key, (k, v) in kv.entries[0].items():
        assert torch.equal(k, before[0][key][0]) and torch.equal(v, before[0][key][1])


def test_kv_cache_is_first_in_first_out() -> None:
    model, kv = random_model(), WindowKV(2)
    with torch.inference_mode():
        for i in range(4):
            model(**inputs(1, seed=i), kv=kv, commit=True)
            assert len(kv.entries) == min(i + 1, 2)
    k, _ = kv.read(0, 0)
    assert torch.equal(k[:, :, k.shape[2] // 2 :], kv.entries[1][0, 0][0])


def test_an_exception_in_a_commit_pass_leaves_the_kv_cache_as_it_was() -> None:
    model, kv = random_model(), WindowKV(2)
    x = inputs(1)
    with torch.inference_mode():
        model(**x, kv=kv, commit=True)
        model.blocks[2].forward = lambda h, ctx: (_ for _ in ()).throw(RuntimeError("boom"))
        with pytest.raises(RuntimeError, match="boom"):
            model(**x, kv=kv, commit=True)
    assert len(kv.entries) == 1


def test_pass_with_wrong_shape_names_the_shapes() -> None:
    x = inputs(1)
    with pytest.raises(ValueError, match=r"expected \[B, 4, 456, 24\]"):
        random_model()(**{**x, "z": x["z"][:, :3]})
    with pytest.raises(ValueError, match="commit pass needs"):
        random_model()(**x, commit=True)


@pytest.mark.parametrize("kind", ["receding", "chunked", "shared", "sliding"])
def test_same_seed_and_actions_give_the_same_rollout(world: World, start: Start, kind: str) -> None:
    def run(seed: int) -> torch.Tensor:
        session = Session(world, start, Protocol.named(kind), seed=seed)
        action = torch.tensor([[8.0, 0.1]]).repeat(session.frames_per_step, 1)
        return torch.cat([session.step(action).latents for _ in range(5)])

    assert torch.equal(run(0), run(0))
    assert not torch.equal(run(0), run(1))


def test_receding_commits_once_per_window_and_shared_with_the_cycle(world: World, start: Start) -> None:
    passes = {}
    for kind in ("receding", "chunked", "shared", "sliding"):
        session = Session(world, start, Protocol.named(kind))
        action = torch.zeros(session.frames_per_step, 2)
        passes[kind] = [session.step(action).passes for _ in range(8)]
    assert passes["receding"] == [4, 4, 4, 5] * 2
    assert passes["chunked"] == [5] * 8
    assert passes["shared"] == [5, 4, 4, 4] * 2
    assert passes["sliding"] == [4, 4, 4, 5] * 2


def test_a_sliding_window_begins_with_what_it_emits_and_commits_whole_windows(world: World) -> None:
    """After a cycle a session stands where a receding one does; inside, the window moves with every step."""
    pose = torch.zeros(16, 3)
    empty = torch.zeros(0, dtype=torch.int64)
    boxes, colours = torch.zeros(0, 7), torch.zeros(0, 3)
    there = torch.zeros(16, 0, dtype=torch.bool)
    told = Scenery(boxes, empty, colours, torch.zeros(16, 0, 7), there, empty, colours, pose, torch.zeros(ATTRIBUTES))
    start = Start(torch.randn(2 * WINDOW, CELLS, Z), torch.zeros(2 * WINDOW, 4), told)
    sliding, receding = (Session(world, start, Protocol.named(kind)) for kind in ("sliding", "receding"))
    times = []
    for n in range(5):
        times.append((sliding._time, sliding._frame))
        for session in (sliding, receding):
            session.step(torch.tensor([[6.0, 0.2]] * 2))
        if n == 3:
            assert (sliding._time, sliding._frame) == (receding._time, receding._frame)
            assert sliding._pose is not None and receding._pose is not None
            torch.testing.assert_close(sliding._pose, receding._pose)
            assert [len(s.kv.entries) for s in (sliding, receding)] == [2, 2]
    assert times == [(8 + n, 8 + n) for n in range(5)]


def test_receding_hears_a_new_action_in_the_middle_of_a_cycle(world: World, start: Start) -> None:
    def run(late: float) -> list[torch.Tensor]:
        session = Session(world, start)
        return [session.step(torch.tensor([[8.0, late if n >= 2 else 0.0]] * 2)).latents for n in range(4)]

    a, b = run(0.0), run(0.5)
    assert all(torch.equal(x, y) for x, y in zip(a[:2], b[:2], strict=True))
    assert not torch.equal(a[2], b[2])


def test_steady_actions_make_the_steps_of_a_cycle_one_computation(world: World, start: Start) -> None:
    actions = [torch.tensor([[8.0, 0.1]] * 2)] * 4
    full, frozen = Session(world, start), Session(world, start, reuse=lambda where: True)
    for action in actions:
        torch.testing.assert_close(full.step(action).latents, frozen.step(action).latents, atol=1e-5, rtol=1e-5)
    assert frozen.step(actions[0]).passes == 4  # the step that starts a cycle is never reused


def test_bad_actions_are_refused_and_the_session_goes_on(world: World, start: Start) -> None:
    session = Session(world, start)
    with pytest.raises(ValueError, match=r"expected \(2, 2\)"):
        session.step(torch.zeros(3, 2))
    with pytest.raises(ValueError, match="NaN"):
        session.step(torch.full((2, 2), float("nan")))
    assert session.step(torch.zeros(2, 2)).latents.shape == (1, CELLS, Z)


def test_protocols_say_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="unknown protocol kind 'spinning'"):
        Protocol.named("spinning")
    with pytest.raises(ValueError, match="kv_every"):
        Protocol(kind="receding", kv_every=2)
    with pytest.raises(ValueError, match="rho"):
        Protocol(noise="correlated", rho=1.5)
    assert Protocol().sigmas.tolist() == pytest.approx([1.0, 0.9, 0.75, 0.5, 0.0])


def test_codec_is_causal_and_linear_part_is_a_projection() -> None:
    codec = random_codec()
    g = torch.Generator().manual_seed(3)
    frames = {
        r.name: torch.randint(0, 256, (4, len(r.cameras), r.height, r.width, 3), generator=g, dtype=torch.uint8)
        for r in RIG
    }
    z = codec.encode(frames)
    assert z.shape == (2, CELLS, Z)
    later = {k: torch.cat((v[:2], 255 - v[2:])) for k, v in frames.items()}
    assert torch.equal(codec.encode(later)[0], z[0])
    decoded = codec.decode(z)
    assert {k: v.shape for k, v in decoded.items()} == {k: v.shape for k, v in frames.items()}
    with pytest.raises(ValueError, match="'rear'"):
        codec.encode({k: v for k, v in frames.items() if k != "rear"})


def test_encoding_what_was_decoded_gives_the_latents_back() -> None:
    codec = random_codec()  # the untrained decoder is the exact inverse projection
    z = 0.01 * torch.randn(2, CELLS, Z, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(codec.encode(codec.decode(z)), z, atol=1e-4, rtol=1e-3)


def test_mirroring_swaps_left_and_right_cameras_and_is_an_involution() -> None:
    frames = {r.name: torch.rand(2, len(r.cameras), r.height, r.width, 3) for r in RIG}
    once = mirror_frames(frames)
    assert torch.equal(once["sides"][:, 0], frames["sides"][:, 1].flip(2))
    twice = mirror_frames(once)
    assert all(torch.equal(twice[k], frames[k]) for k in frames)


def test_hold_keeps_known_actions_and_repeats_the_last_frame() -> None:
    action = latent_actions(torch.arange(16.0).reshape(8, 2))  # 4 latents of two frames
    held = hold(action, 2)
    assert torch.equal(held[:2], action[:2])
    assert torch.equal(held[2], torch.tensor([6.0, 7.0, 6.0, 7.0]))
    assert torch.equal(hold(action, 4), action)
