"""What the world model is told of a scene: boxes where the renderer draws them, futures that are only guessed."""

from __future__ import annotations

import math

import pytest
import torch
from street_doubles import random_model, random_world
from torch import Tensor

import rollcache
from rollcache import Action, XCache
from rollcache.street.data import hold, latent_actions
from rollcache.street.describe import FEATURES, TOKENS, Described, describe, describe_log, distances
from rollcache.street.drives import constant
from rollcache.street.protocol import Protocol
from rollcache.street.rig import CAMERAS, CELLS, RIG
from rollcache.street.scene import Scene
from rollcache.street.scenery import AGENTS, ATTRIBUTES, KINDS, Scenery, attributes_of, driven, scenery_of
from rollcache.street.world import Session, Start


@pytest.fixture(scope="module")
def scenery() -> Scenery:
    return scenery_of(Scene("urban", 3).simulate(constant(8.0, 0.1, 32)))


def empty(frames: int = 8) -> Scenery:
    """A world with nothing in it; the ego stands at the origin and looks along x."""
    return Scenery(
        box=torch.zeros(0, 7),
        kind=torch.zeros(0, dtype=torch.int64),
        colour=torch.zeros(0, 3),
        agent_box=torch.zeros(frames, 0, 7),
        agent_there=torch.zeros(frames, 0, dtype=torch.bool),
        agent_kind=torch.zeros(0, dtype=torch.int64),
        agent_colour=torch.zeros(0, 3),
        pose=torch.zeros(frames, 3),
        attributes=attributes_of("urban", 0),
    )


def car(frames: int = 8, x: float = 12.0, y: float = 0.0, step: float = 0.0, accelerate: float = 0.0) -> Tensor:
    """Boxes [frames, 7] of a car ahead of the ego that moves `step` metres per latent frame, and ever more."""
    n = torch.arange(frames).float()
    box = torch.tensor([x, y, 0.75, 4.5, 1.85, 1.5, 0.0]).repeat(frames, 1)
    box[:, 0] += step * n + accelerate * n * n / 2
    return box


def with_car(box: Tensor) -> Scenery:
    return empty(len(box)).with_agent("car", (0.8, 0.2, 0.2), box, torch.ones(len(box), dtype=torch.bool))


def test_everything_the_renderer_draws_is_noted(scenery: Scenery) -> None:
    kinds = {KINDS[int(k)] for k in scenery.kind}
    assert {"building", "tree", "lamp", "kerb", "line", "zebra", "car"} <= kinds
    highway = {KINDS[int(k)] for k in scenery_of(Scene("highway", 1).simulate(constant(25.0, 0.0, 4))).kind}
    assert {"wall", "line", "sign", "tree", "lamp"} <= highway
    assert scenery.box.isfinite().all() and (scenery.box[:, 3:6] >= 0).all()
    assert len(scenery) == 16 and scenery.agent_box.shape[:2] == (16, len(scenery.agent_kind))


def test_boxes_lie_where_a_pinhole_camera_sees_them() -> None:
    """The nearest face of a box straight ahead, by the textbook."""
    told = describe_log(with_car(car()), 0, 1)
    views = dict(zip(CAMERAS, range(len(CAMERAS)), strict=True))
    front, rear = views["front_narrow"], views["rear"]
    assert told.there[0, front].sum() == 1 and not told.there[0, rear].any()
    left, right, top, bottom = told.rectangle[0, front, 0].tolist()
    near = 12.0 - 4.5 / 2
    slope = math.tan(math.radians(30))
    assert right == pytest.approx(1.85 / 2 / near / slope, rel=1e-4) and left == pytest.approx(-right, rel=1e-4)
    assert bottom == pytest.approx(1.5 / near / (slope / 2), rel=1e-4)  # the ground is 1.5 m below the camera
    assert abs(top) < 1e-4  # and the roof exactly as high as it
    kind = told.features[0, front, 0, -len(KINDS) :]
    assert KINDS[int(kind.argmax())] == "car"


def test_a_side_camera_sees_what_is_beside() -> None:
    told = describe_log(with_car(car(x=0.0, y=6.0)), 0, 1)
    seen = {name for name, there in zip(CAMERAS, told.there[0].any(-1), strict=True) if there}
    assert {"left_front", "left_rear"} <= seen and not seen & {"right_front", "right_rear", "front_narrow", "rear"}


def test_moving_the_ego_is_moving_the_world_the_other_way(scenery: Scenery) -> None:
    box, there = scenery.agents(4, 5)
    pose = scenery.pose[4:5]
    turn, shift = 0.7, torch.tensor([3.0, -8.0])
    cos, sin = math.cos(turn), math.sin(turn)

    def moved(xyz: Tensor) -> Tensor:
        x, y = xyz[..., 0], xyz[..., 1]
        turned = torch.stack((cos * x - sin * y, sin * x + cos * y), -1) + shift
        return torch.cat((turned, xyz[..., 2:-1], xyz[..., -1:] + turn), -1)

    other = Scenery(**{**scenery.tensors(), "box": moved(scenery.box)})
    a = describe(scenery, pose, box, there)
    b = describe(other, moved(pose), moved(box), there)
    assert torch.equal(a.there, b.there)
    torch.testing.assert_close(a.rectangle, b.rectangle, atol=2e-3, rtol=1e-3)


def test_the_mirror_image_is_what_the_mirrored_cameras_see(scenery: Scenery) -> None:
    a, b = describe_log(scenery, 5, 6), describe_log(scenery.mirrored(), 5, 6)
    other_side = {"left": "right", "right": "left"}
    names = ["_".join(other_side.get(word, word) for word in name.split("_")) for name in CAMERAS]
    swap = [CAMERAS.index(name) for name in names]
    order_a = a.rectangle[0].sum(-1).sort(-1).values
    flipped = b.rectangle[0, swap][..., [1, 0, 2, 3]] * torch.tensor([-1, -1, 1, 1])
    torch.testing.assert_close(order_a, flipped.sum(-1).sort(-1).values, atol=1e-3, rtol=1e-3)
    assert b.attributes[0, -1] == -a.attributes[0, -1]


def test_what_has_not_happened_is_extrapolated_from_what_has() -> None:
    """A car that brakes after frame 3 is not known to brake at frame 3."""
    box = car(step=1.0)
    box[4:, 0] = box[3, 0]
    scenery = with_car(box)
    seen, there = scenery.agents(2, 8, known=2)
    assert there.all()
    assert seen[:, 0, 0].tolist() == pytest.approx([14, 15, 16, 17, 18, 19])
    assert scenery.agents(2, 8)[0][:, 0, 0].tolist() == pytest.approx([14, 15, 15, 15, 15, 15])
    beyond, _ = with_car(car(step=1.0)).agents(6, 11)  # the log ends at 8
    assert beyond[:, 0, 0].tolist() == pytest.approx([18, 19, 20, 21, 22])
    assert with_car(car(step=1.0)).agents(20, 22)[0][:, 0, 0].tolist() == pytest.approx([32, 33])


def test_held_actions_lead_the_ego_where_they_say(scenery: Scenery) -> None:
    drive = constant(8.0, 0.1, 32)
    action = latent_actions(torch.tensor([[8.0, 0.1]] * 32))
    torch.testing.assert_close(driven(scenery.pose[3], action[4:8]), scenery.pose[4:8], atol=1e-3, rtol=1e-5)
    assert len(drive) == 32
    held = hold(action[4:8], 2)
    a, b = describe_log(scenery, 4, 8), describe_log(scenery, 4, 8, 2, held)
    torch.testing.assert_close(a.rectangle[:2], b.rectangle[:2])
    assert (a.rectangle[2:] - b.rectangle[2:]).abs().median() < 1e-3  # a constant drive is held exactly


def test_an_agent_covers_the_cells_that_it_is_drawn_in() -> None:
    cover = describe_log(with_car(car()), 0, 1).agents()
    assert cover.shape == (1, CELLS) and float(cover.min()) >= 0 and float(cover.max()) <= 1
    near, far = describe_log(with_car(car(x=8)), 0, 1).agents(), describe_log(with_car(car(x=60)), 0, 1).agents()
    assert near.sum() > 3 * cover.sum() / 2 > 10 * far.sum() / 2
    rows, columns = RIG[0].grid
    camera = cover[0, : rows * columns].reshape(rows, columns)
    assert torch.allclose(camera, camera.flip(1), atol=1e-4) and camera[: rows // 2].sum() < 1e-3
    assert describe_log(empty(), 0, 1).agents().sum() == 0


def test_distances_are_those_of_a_naive_loop() -> None:
    told = describe_log(with_car(car()), 0, 1)
    rows, columns = RIG[0].grid
    left, right, top, bottom = told.rectangle[0, 0, 0].tolist()
    fast = distances(told.rectangle)[0][0, :, 0]
    for cell in range(rows * columns):
        x, y = (cell % columns + 0.5) * 2 / columns - 1, (cell // columns + 0.5) * 2 / rows - 1
        dx = max(left - x, x - right, 0) * columns / 2
        dy = max(top - y, y - bottom, 0) * rows / 2
        assert float(fast[cell]) == pytest.approx(dx * dx + dy * dy, abs=1e-4)


def test_a_crowded_scene_is_cut_to_the_tokens_that_fit(scenery: Scenery) -> None:
    told = describe_log(scenery, 0, 2)
    assert told.features.shape == (2, len(CAMERAS), TOKENS, FEATURES)
    assert told.attributes.shape == (2, ATTRIBUTES)
    assert not told.features[~told.there].any() and told.features.isfinite().all()


@pytest.mark.parametrize(
    ("kind", "frames", "message"), [("tank", 8, "unknown agent 'tank'"), ("car", 7, r"expected \(8, 7\) and \(8,\)")]
)
def test_agents_that_cannot_be_are_refused(kind: str, frames: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        empty().with_agent(kind, (1, 0, 0), car(frames), torch.ones(frames, dtype=torch.bool))
    assert "car" in AGENTS


# -- inside the transformer --------------------------------------------------------------------------------------------


def passes(told: Described | None, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Output of one pass and the hidden state that enters its first block."""
    model = random_model()
    generator = torch.Generator().manual_seed(seed)
    for block in model.blocks:
        if block.temporal:
            torch.nn.init.normal_(block.answer.weight, std=0.3, generator=generator)
    seen: list[Tensor] = []
    model.blocks[0].register_forward_pre_hook(lambda _, args: seen.append(args[0].clone()))
    with torch.inference_mode():
        out = model(
            torch.randn(1, 4, CELLS, 24, generator=generator),
            torch.full((1, 1), 0.5),
            torch.zeros(1, 4, 4),
            torch.zeros(1, 1, CELLS, 24),
            torch.ones(1, 1),
            torch.zeros(1, 1),
            told=told if told is None else told.map(lambda x: x[None]),
        )
    return out, seen[0]


def test_what_is_told_changes_the_output_and_never_the_input_of_a_block() -> None:
    """The condition-visibility gap: nothing that looks at block inputs alone can see a car that cuts in."""
    nothing, bare = passes(None)
    one, with_one = passes(describe_log(with_car(car()), 0, 4))
    other, with_other = passes(describe_log(with_car(car(x=7)), 0, 4))
    assert torch.equal(bare, with_one) and torch.equal(bare, with_other)
    assert not torch.equal(nothing, one) and not torch.equal(one, other)


def test_absent_tokens_are_not_attended_to() -> None:
    told = describe_log(with_car(car()), 0, 4)
    noise = torch.where(told.there[..., None], told.features, torch.randn(told.features.shape))
    a, _ = passes(told)
    b, _ = passes(Described(noise, told.rectangle, told.there, told.attributes))
    torch.testing.assert_close(a, b)


def rollout(scenery: Scenery | None, policy: XCache | None, chunks: int = 12) -> tuple[list[Tensor], list[str]]:
    """Latents and one letter per (chunk, cell) decision of a rollout with constant actions."""
    world = random_world()
    generator = torch.Generator().manual_seed(0)
    start = Start(torch.randn(8, CELLS, 24, generator=generator), torch.zeros(8, 4), scenery)
    handle = None if policy is None else rollcache.enable(world.model, policy)
    session = Session(world, start, Protocol())
    out = [session.step(torch.zeros(2, 2)).latents for _ in range(chunks)]
    if handle is None:
        return out, []
    words: dict[int, str] = {}
    for record in handle.trace:
        letter = "R" if record.action is Action.REPLAY else "C"
        words[record.chunk] = words.get(record.chunk, "") + letter
    return out, [words[n] for n in sorted(words)]


def test_a_car_that_cuts_in_is_followed_by_the_declared_condition_and_missed_by_the_fingerprint() -> None:
    """Frame 14 of the log is generation step 6, the third of its KV cycle."""
    frames = 8 + 12
    box, there = car(frames, x=9.0), torch.arange(frames) >= 14
    calm, cut_in = empty(frames), empty(frames).with_agent("car", (0.9, 0.1, 0.1), box, there)
    ours, blind = XCache(), XCache(condition_tol=None)
    _, before = rollout(calm, ours)
    _, after = rollout(cut_in, ours)
    assert "R" in before[6] and "R" not in after[6]
    assert before[5] == after[5] and "R" in after[7]  # from then on it is known
    _, missed = rollout(cut_in, blind)
    assert "R" in missed[6]
    assert "R" in rollout(cut_in, XCache.paper())[1][6]  # as published: the gate does not see the traffic


def test_a_rollout_follows_its_own_way_not_the_logged_one() -> None:
    """The log drives straight on; the actions turn, so the car ahead leaves the picture to the right."""
    scenery = with_car(car(20, x=20.0))
    world = random_world()
    start = Start(torch.zeros(8, CELLS, 24), torch.zeros(8, 4), scenery)
    session = Session(world, start, Protocol.named("chunked"))
    for _ in range(2):
        session.step(torch.tensor([[0.0, 0.6]] * 8))
    assert session._pose is not None
    torch.testing.assert_close(session._pose, torch.tensor([0.0, 0.0, 0.6 * 16 / 12]), atol=1e-5, rtol=1e-5)


def test_a_scenery_shorter_than_the_start_is_refused() -> None:
    world = random_world()
    frames = {g.name: torch.zeros(16, len(g.cameras), g.height, g.width, 3, dtype=torch.uint8) for g in RIG}
    with pytest.raises(ValueError, match="the scenery has 4 latent frames; the start needs 8"):
        world.start(frames, torch.zeros(16, 2), empty(4))
    with pytest.raises(ValueError, match="the scenery has 4 latent frames; the start has 8"):
        Session(world, Start(torch.zeros(8, CELLS, 24), torch.zeros(8, 4), empty(4)))
