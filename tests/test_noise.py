"""Noise banks: every draw is standard normal by itself, chunks share what the bank says, and nothing else."""

from __future__ import annotations

import sys
import warnings
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollcache import noise

SIZE = 20_000  # a mean is then within 0.03 of its value, four times its standard deviation


def correlation(a: Tensor, b: Tensor) -> float:
    return float((a * b).mean())


BANKS = [noise.fresh(), noise.per_cycle(3), noise.per_cycle(None), noise.correlated(0.8, 3), noise.correlated(0.25)]


@pytest.mark.parametrize("bank", BANKS)
def test_every_draw_is_standard_normal_by_itself(bank: noise.Bank) -> None:
    for chunk, step in ((0, 0), (4, 0), (4, 2)):
        x = bank.at(chunk, step)(SIZE)
        assert abs(float(x.mean())) < 0.03
        assert float(x.var()) == pytest.approx(1, abs=0.04)
        assert float((x**4).mean()) == pytest.approx(3, abs=0.3)  # normal, not just of that variance


@given(rho=st.floats(0, 1), every=st.integers(1, 5), a=st.integers(0, 9), b=st.integers(0, 9), seed=st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_chunks_of_a_cycle_are_correlated_by_rho_and_others_are_independent(
    rho: float, every: int, a: int, b: int, seed: int
) -> None:
    bank = noise.correlated(rho, every, seed=seed)
    x, y = bank.at(a)(SIZE), bank.at(b)(SIZE)
    expected = 1.0 if a == b else rho if a // every == b // every else 0.0
    assert correlation(x, y) == pytest.approx(expected, abs=0.05)


def test_the_ends_of_rho_are_fresh_and_per_cycle() -> None:
    for chunk in range(5):
        assert torch.equal(noise.correlated(0, 2).at(chunk)(6), noise.fresh().at(chunk)(6))
        assert torch.equal(noise.correlated(1, 2).at(chunk)(6), noise.per_cycle(2).at(chunk)(6))


@pytest.mark.parametrize("bank", BANKS)
def test_steps_draws_and_seeds_are_independent(bank: noise.Bank) -> None:
    randn = bank.at(4, 1)
    other = noise.Bank(rho=bank.rho, every=bank.every, seed=1)
    first = randn(SIZE)
    for another in (randn(SIZE), bank.at(4, 2)(SIZE), other.at(4, 1)(SIZE)):
        assert abs(correlation(first, another)) < 0.05


@pytest.mark.parametrize("bank", BANKS)
def test_a_draw_depends_on_nothing_but_its_place(bank: noise.Bank) -> None:
    forwards = [bank.at(n, t)(3) for n in range(4) for t in range(2)]
    torch.manual_seed(5)
    state = torch.get_rng_state()
    backwards = [bank.at(n, t)(3) for n in reversed(range(4)) for t in reversed(range(2))]
    assert all(torch.equal(a, b) for a, b in zip(forwards, reversed(backwards), strict=True))
    assert torch.equal(torch.get_rng_state(), state)  # the global generator is left alone


def test_it_stands_in_for_randn_and_randn_like() -> None:
    bank = noise.fresh(seed=3)
    as_numbers, as_shape = bank.at(1)(2, 3), bank.at(1)((2, 3))
    assert torch.equal(as_numbers, as_shape)
    assert torch.equal(bank.at(1)(torch.Size([2, 3]), dtype=torch.float64).float(), as_numbers)
    assert bank.at(0)().shape == ()
    like = bank.at(1).like(torch.empty(2, 3, dtype=torch.bfloat16))
    assert like.dtype is torch.bfloat16
    assert torch.equal(like, as_numbers.bfloat16())
    assert bank.at(1)(2, 3, device="meta").device.type == "meta"
    with torch.device("meta"):
        assert bank.at(1)(2, 3).device.type == "meta"


def test_a_loop_can_tell_the_cache_which_chunks_start_from_new_noise() -> None:
    assert [noise.fresh().is_fresh(n) for n in range(4)] == [True] * 4
    assert [noise.per_cycle(2).is_fresh(n) for n in range(4)] == [True, False, True, False]
    assert [noise.per_cycle(None).is_fresh(n) for n in range(3)] == [True, False, False]
    assert [noise.correlated(0.9, 2).is_fresh(n) for n in range(3)] == [True] * 3


@given(
    bank=st.sampled_from(BANKS),
    lengths=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    dim=st.integers(-3, 2),
    step=st.integers(0, 2),
)
@settings(max_examples=60, deadline=None)
def test_the_noise_of_a_video_is_that_of_its_chunks(bank: noise.Bank, lengths: list[int], dim: int, step: int) -> None:
    size = [2, 5, 3]
    size[dim] = sum(lengths)
    made = bank.video(*size, frames=lengths, dim=dim, step=step)
    assert list(made.shape) == size
    size[dim] = max(lengths)
    for n, chunk in enumerate(made.split(lengths, dim)):
        assert torch.equal(chunk, bank.at(n, step)(*size).narrow(dim, 0, lengths[n]))


def test_the_chunks_of_a_video_may_be_of_one_length_and_the_rest_is_as_for_every_draw() -> None:
    bank = noise.per_cycle(2, seed=3)
    made = bank.video(1, 6, 4, frames=2)
    assert torch.equal(made, bank.video((1, 6, 4), frames=[2, 2, 2], dim=-2))
    assert torch.equal(made[:, :2], made[:, 2:4]) and not torch.equal(made[:, :2], made[:, 4:])
    half = bank.video(1, 6, 4, frames=(2, 2, 2), dtype=torch.bfloat16)
    assert torch.equal(half, made.bfloat16())
    assert bank.video(1, 6, 4, frames=2, device="meta").device.type == "meta"


def test_whole_numbers_may_be_those_of_numpy() -> None:
    two, three = np.int64(2), np.int32(3)
    bank = noise.per_cycle(two, seed=three)  # type: ignore[arg-type]
    assert bank == noise.per_cycle(2, seed=3)
    assert bank.describe() == noise.per_cycle(2, seed=3).describe()
    assert torch.equal(bank.at(three, step=two)(4), noise.per_cycle(2, seed=3).at(3, step=2)(4))  # type: ignore[arg-type]
    assert bank.is_fresh(two) is True
    assert bank.is_fresh(three) is False
    assert torch.equal(bank.video(1, 6, 2, frames=[two, 4]), bank.video(1, 6, 2, frames=[2, 4]))  # type: ignore[list-item]


def test_a_pipeline_that_takes_the_noise_of_a_video_starts_every_chunk_from_the_bank() -> None:
    pytest.importorskip("transformers", reason="the pipelines of diffusers need it: pip install 'rollcache[diffusers]'")
    pytest.importorskip("diffusers", reason="the real pipeline is needed: pip install 'rollcache[diffusers]'")
    from diffusers_doubles import WAN, diffusers, quiet, seeded, vae

    lengths = [1, 2, 2, 1]
    model = seeded(lambda: diffusers.AnyFlowFARTransformer3DModel(**WAN, chunk_partition=tuple(lengths)))
    scheduler = diffusers.FlowMapEulerDiscreteScheduler()
    parts = {"tokenizer": None, "text_encoder": None, "vae": vae(), "scheduler": scheduler, "transformer": model}
    pipe = quiet(diffusers.AnyFlowFARPipeline(**parts))
    bank, started = noise.per_cycle(None, seed=1), []

    def watch(_: Any, args: Any, kwargs: Any) -> None:
        if not kwargs["kv_cache_flag"]["is_cache_step"]:
            started.append(kwargs["hidden_states"])  # [B, F, C, H, W]

    hook = model.register_forward_pre_hook(watch, with_kwargs=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # flex_attention without torch.compile, on a CPU
        pipe(
            prompt=None,
            prompt_embeds=torch.zeros(1, 8, 16),
            height=32,
            width=32,
            num_frames=21,
            num_inference_steps=1,
            chunk_partition=lengths,
            latents=bank.video(1, 4, 6, 4, 4, frames=lengths, dim=2),
            output_type="latent",
        )
    hook.remove()
    longest = bank.at(0)(1, 4, 2, 4, 4).transpose(1, 2)
    assert len(started) == 4
    assert all(torch.equal(x, longest[:, :length]) for x, length in zip(started, lengths, strict=True))


@pytest.fixture
def example() -> Any:
    path = Path(__file__).parent.parent / "examples" / "self_forcing.py"
    spec = spec_from_file_location("self_forcing_example", path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_example_draws_the_noise_between_steps_from_its_bank_at_their_chunk_and_step(example: Any) -> None:
    class Scheduler:
        def add_noise(self, clean: Tensor, like: Tensor, t: Tensor) -> Tensor:
            return clean + t * like

    scheduler, bank = Scheduler(), noise.per_cycle(None, seed=4)
    scheduler.add_noise = example.NoiseAfterSteps(bank, scheduler)  # type: ignore[method-assign]
    clean, t = torch.ones(2, 3), torch.tensor(0.5)
    made = [scheduler.add_noise(clean, torch.empty(2, 3), t) for _ in range(6)]
    expected = [clean + t * bank.at(n, step)(2, 3) for n in range(2) for step in (1, 2, 3)]
    assert all(map(torch.equal, made, expected))
    assert torch.equal(made[0], made[3]) and not torch.equal(made[0], made[1])


@pytest.mark.parametrize(
    ("repo", "says"),
    [
        ("nowhere", "nowhere: no such folder"),
        ("empty", "empty: no checkout of Self-Forcing, it has no pipeline/causal_inference.py"),
        ("bare", "bare: its code needs the module a_module_that_is_not_there"),
    ],
)
def test_the_example_says_in_one_line_what_is_wrong_with_a_checkout(
    example: Any,
    repo: str,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "empty").mkdir()
    for part in example.PARTS:
        (tmp_path / "bare" / part).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "bare" / part).write_text("")
    (tmp_path / "bare" / "pipeline" / "__init__.py").write_text("import a_module_that_is_not_there")
    monkeypatch.setattr(sys, "argv", ["self_forcing.py", "--repo", str(tmp_path / repo)])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with torch.no_grad(), pytest.raises(SystemExit) as stopped:
        example.main()
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


def test_a_bank_says_in_one_line_what_it_does() -> None:
    assert noise.fresh(seed=2).describe() == "noise: fresh for every chunk, seed 2"
    assert noise.per_cycle(None).describe() == "noise: one for the whole rollout, seed 0"
    assert noise.correlated(0.5, 4).describe() == (
        "noise: correlated between chunks with rho=0.5, one shared part per cycle of 4 chunks, seed 0"
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: noise.correlated(1.5), r"rho must be in \[0, 1\]"),
        (lambda: noise.per_cycle(0), "every must be an integer of at least 1"),
        (lambda: noise.fresh(seed=-1), "seed must be"),
        (lambda: noise.fresh().at(-1), "chunk must be"),
        (lambda: noise.fresh().at(0, 0.5), "step must be"),  # type: ignore[arg-type]
        (lambda: noise.fresh().at(True), "chunk must be"),
        (lambda: noise.fresh().at(torch.tensor(1)), "chunk must be"),  # type: ignore[arg-type]
        (lambda: noise.fresh().is_fresh(-1), "chunk must be"),
        (lambda: noise.fresh().video(1, 7, 4, frames=3), r"have 7 frames in dimension 1, which frames=3 does not div"),
        (
            lambda: noise.fresh().video(1, 7, 4, frames=[1, 3]),
            r"have 7 frames in dim.*, but frames=\[1, 3\] add up to 4",
        ),
        (lambda: noise.fresh().video(1, 4, 7, frames=[3, 0, 4], dim=2), "frames must be an integer of at least 1"),
        (lambda: noise.fresh().video(1, 0, 7, frames=[]), "have 0 frames"),
        (lambda: noise.fresh().video(1, 0, 7, frames=2), "have 0 frames"),
        (lambda: noise.fresh().video(4, frames=2), r"dim=1 is no dimension of latents of shape \(4,\)"),
    ],
)
def test_what_cannot_be_is_named(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
