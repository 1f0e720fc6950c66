"""Where a loop is, told from the calls of its model: counted by hand, and in loops that do something odd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from rollcache import RollcacheError
from rollcache.adapters.loops import Loop, Spot, generation, levels_of, one_level

A, B = torch.tensor([1.0]), torch.tensor([2.0])


def loop() -> Loop:
    return Loop(nn.Identity())


def at(loop: Loop, level: float | Tensor, prompt: Tensor = A, **given: Any) -> tuple[int, int, str]:
    timestep = level if isinstance(level, Tensor) else torch.tensor([level])
    return loop.at(timestep, (prompt,), **given)[:3]


def moved(loop: Loop, level: float, prompt: Tensor = A) -> float:
    """How often the prompt has changed."""
    spot: Spot = loop.at(torch.tensor([level]), (prompt,))
    return float(spot.conditions[0].value - 1)


@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(1, 3)), min_size=1, max_size=5),
    st.booleans(),
    st.data(),
)
def test_chunks_steps_and_branches_are_counted(chunks: list[tuple[int, int]], announced: bool, data: Any) -> None:
    model = nn.Identity()
    it, prompts, seen, expected = Loop(model), [torch.tensor([float(i)]) for i in range(3)], [], []

    def run() -> None:
        for n, (steps, branches) in enumerate(chunks):
            levels = data.draw(st.lists(st.integers(1, 999), min_size=steps - 1, max_size=steps - 1, unique=True))
            for t, level in enumerate([1000, *sorted(levels, reverse=True)]):
                timestep = torch.tensor([level, level])
                for b in range(branches):
                    seen.append(at(it, timestep, prompts[b]))
                    expected.append((n if announced else 0, t, ("cond", "uncond", "branch 2")[b]))

    if announced:
        with generation(model):
            run()
    else:
        run()
    assert seen == expected


def test_a_level_that_does_not_fall_begins_a_chunk() -> None:
    it = loop()
    with it.generation(None):
        levels = [900.0, 500.0, 900.0, 500.0, 500.0, 400.0, 700.0]
        assert [at(it, v)[:2] for v in levels] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0)]


def test_frames_at_levels_of_their_own_may_wait_but_not_go_back() -> None:
    it = loop()
    rows = [[900, 999, 999], [500, 999, 999], [0, 500, 999], [0, 0, 400], [20, 999, 999], [20, 500, 999], [20, 999, 0]]
    found = [at(it, torch.tensor([row, row]))[1] for row in rows]
    assert found == [0, 1, 2, 3, 0, 1, 0]
    assert at(it, torch.tensor([[20, 900]]))[1] == 0, "another number of frames"


def test_other_tokens_begin_a_chunk_though_the_level_falls() -> None:
    it = loop()
    with it.generation(None):
        calls = [(900.0, (2, 2)), (600.0, (2, 2)), (500.0, (4, 4)), (400.0, (4, 4))]
        assert [at(it, v, layout=layout)[:2] for v, layout in calls] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_a_branch_keeps_its_name_when_the_order_changes_or_one_is_left_out() -> None:
    it = loop()
    first, second, third = (torch.tensor([v]) for v in (900.0, 600.0, 300.0))
    assert [at(it, first, A)[2], at(it, first, B)[2]] == ["cond", "uncond"]
    assert [at(it, second, B)[2], at(it, second, A)[2]] == ["uncond", "cond"]
    assert at(it, third, B) == (0, 2, "uncond")


def test_one_tensor_that_is_prompt_and_negative_prompt_is_two_branches() -> None:
    it = loop()
    with it.generation(None):
        steps = [torch.tensor([v]) for v in (900.0, 500.0, 900.0)]
        assert [at(it, t) for t in steps for _ in range(2)] == [
            *[(0, 0, "cond"), (0, 0, "uncond"), (0, 1, "cond"), (0, 1, "uncond")],
            *[(1, 0, "cond"), (1, 0, "uncond")],
        ]


def test_a_wrapper_that_copies_the_timestep_for_every_call_makes_no_chunks() -> None:
    it = loop()
    with it.generation(None):
        calls = [(v, p) for v in (900.0, 500.0, 900.0) for p in (A, B)]
        expected = [(n, t, b) for n, t in ((0, 0), (0, 1), (1, 0)) for b in ("cond", "uncond")]
        assert [at(it, v, p) for v, p in calls] == expected
        assert [at(it, v, p.clone()) for v, p in calls] == [(n + 2, t, b) for n, t, b in expected], "nor of prompts"
        assert at(it, 900.0, A, layout=1) == (4, 0, "cond"), "other tokens do"


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("prompts", [(A,), (A, B)])
def test_one_step_after_another_at_the_same_level_with_the_same_prompts_is_a_chunk_each(
    prompts: tuple[Tensor, ...], copied: bool
) -> None:
    it, names = loop(), ("cond", "uncond")
    with it.generation(1):
        for n in range(5):
            timestep = torch.tensor([900.0])
            found = [at(it, timestep, p.clone() if copied else p) for p in prompts]
            assert found == [(n, 0, name) for name in names[: len(prompts)]]


def test_calls_that_may_be_chunks_of_one_step_are_three_branches_at_most() -> None:
    it, timestep = loop(), torch.tensor([900.0])
    with it.generation(1):
        one_tensor = [at(it, timestep) for _ in range(4)]
        assert [spot[:2] for spot in one_tensor] == [(0, 0), (0, 0), (0, 0), (1, 0)]
        assert one_tensor[-1][2] == "cond"
        other_prompts = [at(it, 900.0, torch.tensor([float(v)])) for v in range(5, 9)]
        assert [spot[0] for spot in other_prompts] == [1, 1, 2, 2]


@pytest.mark.parametrize("copied", [False, True])
def test_latents_tell_branches_from_chunks_of_one_step(copied: bool) -> None:
    it, timestep = loop(), torch.tensor([900.0])

    def call(latents: Tensor, prompt: Tensor) -> tuple[int, int, str]:
        return at(it, 900.0, prompt, latents=latents.clone()) if copied else at(it, timestep, prompt, latents=latents)

    with it.generation(1):
        for n in range(4):
            latents = torch.tensor([float(n)])
            second = torch.tensor([5.0]) if copied else A  # else one tensor as both prompts
            assert [call(latents, A), call(latents, second)] == [(n, 0, "cond"), (n, 0, "uncond")]


def test_a_video_after_one_that_was_broken_off_in_its_first_step_begins_a_chunk() -> None:
    it = loop()
    with it.generation(None):
        at(it, 900.0, torch.tensor([7.0]), latents=torch.tensor([1.0]))
        levels, latents = [torch.tensor([v]) for v in (900.0, 500.0)], [torch.tensor([v]) for v in (2.0, 3.0)]
        found = [at(it, t, p, latents=x) for t, x in zip(levels, latents, strict=True) for p in (A, B)]
    assert found == [(1, t, b) for t in range(2) for b in ("cond", "uncond")]


def test_a_timestep_that_was_written_over_is_another_step() -> None:
    for made in (torch.no_grad, torch.inference_mode):
        with made():
            it, timestep = loop(), torch.tensor([900.0])
            for step, level in enumerate((900.0, 500.0, 300.0)):
                timestep.fill_(level)
                assert [at(it, timestep, A), at(it, timestep, B)] == [(0, step, "cond"), (0, step, "uncond")]
    timestep = torch.tensor([200.0])
    assert at(it, timestep)[1] == 3
    timestep.fill_(200.0)
    assert at(it, timestep)[1] == 0, "a chunk at the level of the last one"


def test_prompts_are_compared_only_when_they_are_other_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    it = loop()
    prompt = torch.tensor([3.0])
    assert [moved(it, 900.0, prompt), moved(it, 800.0, prompt.clone()), moved(it, 700.0, prompt)] == [0, 0, 0]
    assert moved(it, 600.0, torch.tensor([4.0])) == 1
    assert moved(it, 500.0, torch.tensor([4.0, 4.0])) == 2
    prompt = torch.tensor([4.0, 4.0])
    assert moved(it, 400.0, prompt) == 2
    prompt[0] = 5.0
    assert moved(it, 300.0, prompt) == 3, "written to"
    prompt[0] = 5.0
    assert moved(it, 200.0, prompt) == 3, "written to, with what was there"
    monkeypatch.setattr(torch, "equal", None)
    assert moved(it, 100.0, prompt) == 3


def test_a_prompt_that_counts_no_writes_is_compared_with_a_copy_at_every_call() -> None:
    it = loop()
    with torch.inference_mode():
        prompt = torch.tensor([3.0])
        assert [moved(it, 900.0, prompt), moved(it, 800.0, prompt)] == [0, 0]
        prompt.fill_(4.0)
        assert [moved(it, 700.0, prompt), moved(it, 600.0, prompt)] == [1, 1]
    assert moved(it, 500.0, torch.tensor([4.0])) == 1


class Owner:
    pass


def test_a_cache_of_keys_and_values_is_one_generation_and_its_chunks_are_those_that_are_named() -> None:
    it, first, second = loop(), Owner(), Owner()
    it.owned_by(first)
    assert [at(it, v, chunk=n)[:2] for v, n in ((900.0, 4), (500.0, 4), (900.0, 5), (900.0, 5), (500.0, 6))] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 0),  # begun again
        (2, 0),
    ]
    assert it.chunk == 2
    assert at(it, 300.0, chunk=5)[:2] == (0, 0), "an earlier chunk: nothing of later ones may be reused"
    assert at(it, 100.0, chunk=5)[:2] == (0, 1)
    it.owned_by(first)
    assert at(it, 90.0, chunk=5)[:2] == (0, 2), "the same cache"
    it.owned_by(second)
    assert at(it, 80.0, chunk=5)[:2] == (0, 0), "another one"
    del second
    it.owned_by(Owner())
    assert at(it, 70.0, chunk=5)[:2] == (0, 0), "a new one where a dead one was"


def test_generations_do_not_nest_and_need_a_loop_that_counts() -> None:
    model = nn.Identity()
    with pytest.raises(RollcacheError, match=r"generation\(\) is for models"), generation(model):
        pass
    Loop(model)
    with generation(model), pytest.raises(RollcacheError, match="inside a generation"), generation(model):
        pass
    with pytest.raises(ValueError, match="steps"), generation(model, steps=0):
        pass
    with generation(model):
        pass


def test_timesteps_as_numbers() -> None:
    assert levels_of(torch.tensor(7)) == (7,)
    assert levels_of(torch.tensor([5, 5])) == (5,)
    assert levels_of(torch.tensor([[5, 4, 3], [5, 4, 3]])) == (5, 4, 3)
    assert one_level(torch.full((2, 9), 4.0)) == (4,)
    for mixed in (torch.tensor([5, 4]), torch.tensor([[5, 4], [5, 3]])):
        with pytest.raises(RollcacheError, match="different timesteps"):
            levels_of(mixed)
    with pytest.raises(RollcacheError, match="timesteps from 4 to 5"):
        one_level(torch.tensor([[5, 4]]))
