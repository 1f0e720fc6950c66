"""The cache on the street world's transformer: small, random weights, the real loop's arguments."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import rollcache
from rollcache import Action, Reason, RollcacheError, WindowReuse, XCache
from rollcache.street.dit import DiTConfig, StreetDiT, WindowKV
from rollcache.street.protocol import Where
from rollcache.street.rig import CELLS

CONFIG = DiTConfig(width=64, depth=4, heads=2, rank=16, channels=8)
STEPS = 2


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def model() -> StreetDiT:
    """Untrained, but with open gates: adaLN-Zero would add nothing."""
    torch.manual_seed(0)
    model = StreetDiT(CONFIG)
    for block in model.blocks:
        torch.nn.init.normal_(block.mod_out.weight, std=0.05)
        torch.nn.init.normal_(block.mod_out.bias, std=0.3)
    torch.nn.init.normal_(model.head.weight, std=0.05)
    return model.requires_grad_(False)


class World:
    """The receding loop, boiled down: every chunk denoises the window of its cycle from the noise of the cycle."""

    def __init__(self, model: StreetDiT, rollout: int) -> None:
        self.model, self.rollout, self.kv = model, rollout, WindowKV(2)
        self.noise = torch.randn(1, 4, CELLS, 8, generator=torch.Generator().manual_seed(rollout))

    def call(self, z: Tensor, t: float, action: Tensor, where: Where | None, commit: bool = False) -> Tensor:
        return self.model(
            z,
            torch.full((1, 1), t),
            action[None],
            torch.zeros(1, 1, CELLS, 8),
            torch.zeros(1, 1),
            torch.zeros(1, 1),
            kv=self.kv,
            commit=commit,
            where=where,
        )

    def chunk(self, n: int, speed: float, yaw: float) -> Tensor:
        action = torch.tensor([[speed, yaw] * 2] * 4)
        where = Where(self.rollout, n, 0, "denoise", kv_update=n % 4 == 0, action=action)
        z = self.noise + n // 4
        for i in range(STEPS):
            z = z - self.call(z, 1 - i / STEPS, action, replace(where, step=i)) / STEPS
        if n % 4 == 3:
            self.call(z, 0.0, action, Where(self.rollout, n, 0, "commit", action=action), commit=True)
        return z


DRIVE = [(10.0, 0.0)] * 6 + [(10.0, 0.1)] * 2 + [(10.0, 0.0)]


def drive(model: StreetDiT, rollout: int) -> list[Tensor]:
    world = World(model, rollout)
    return [world.chunk(n, *action) for n, action in enumerate(DRIVE)]


def test_the_adapter_is_found_and_a_shut_gate_gives_the_bare_model(model: StreetDiT) -> None:
    bare = drive(model, 1)
    with rollcache.enable(model, XCache(min_cosine=1)) as handle:
        assert all(torch.equal(a, b) for a, b in zip(bare, drive(model, 1), strict=True))
        assert handle.stats().skipped == 0
    assert all(torch.equal(a, b) for a, b in zip(bare, drive(model, 1), strict=True))


def test_steady_driving_is_replayed_and_a_turn_of_the_wheel_is_followed(model: StreetDiT) -> None:
    bare = drive(model, 2)
    with rollcache.enable(model, XCache()) as handle:
        cached = drive(model, 2)
        actions = {n: {r.action for r in handle.trace if r.chunk == n and r.block} for n in range(len(DRIVE))}
        reasons = {r.reason for r in handle.trace if r.chunk == 6 and r.block}
    assert [n for n, seen in actions.items() if seen == {Action.REPLAY}] == [1, 2, 3, 5, 7]
    assert reasons == {Reason.CONDITION}
    for n in (0, 4, 6, 8):
        torch.testing.assert_close(cached[n], bare[n])
    for n in (1, 2, 3, 5, 7):  # nothing changed since the chunk before
        torch.testing.assert_close(cached[n], bare[n], atol=1e-4, rtol=1e-4)


def test_the_raw_cosine_of_the_paper_does_not_see_that_turn(model: StreetDiT) -> None:
    with rollcache.enable(model, XCache.paper()) as handle:
        drive(model, 3)
        assert {r.action for r in handle.trace if r.chunk == 6 and r.block} == {Action.REPLAY}


def test_window_reuse_needs_no_pass_and_says_so_to_the_loop(model: StreetDiT) -> None:
    bare = drive(model, 4)
    with rollcache.enable(model, WindowReuse()) as handle:
        world, windows = World(model, 4), []
        for n, (speed, yaw) in enumerate(DRIVE):
            action = torch.tensor([[speed, yaw] * 2] * 4)
            where = Where(4, n, 0, "denoise", kv_update=n % 4 == 0, action=action)
            if handle.skip_chunk(where):
                windows.append(windows[-1])
                if n % 4 == 3:
                    world.call(windows[-1], 0.0, action, Where(4, n, 0, "commit", action=action), commit=True)
            else:
                windows.append(world.chunk(n, speed, yaw))
        stats = handle.stats()
    assert stats.passes == {"denoise": 4 * STEPS, "commit": 2}
    assert stats.skip_rate == 5 / 8
    for a, b in zip(windows, bare, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_a_cached_model_must_be_told_where_it_is(model: StreetDiT) -> None:
    world = World(model, 5)
    with rollcache.enable(model, XCache()), pytest.raises(RollcacheError, match="without where="):
        world.call(world.noise, 1.0, torch.zeros(4, 4), None)
    world.call(world.noise, 1.0, torch.zeros(4, 4), None)


def test_every_camera_is_looked_at_in_its_own_grid(model: StreetDiT) -> None:
    with rollcache.enable(model, XCache()) as handle:
        drive(model, 6)
        (sampler,) = handle._engine._samplers.values()
    assert [s.name for s in sampler.segments] == ["front", "sides", "rear"]
    assert sampler.groups == 3
    assert [j - i for i, j in sampler.entries] == [2 * 30, 4 * 30, 30, 2, 4, 1]
    assert len(set(sampler.index[0].tolist())) == 7 * 30
