"""`check_adapter` on the model families of diffusers, in the loops that `benchmarks/adapters.py` times.

Branches have no names in these loops, the first one called is the conditional one: so their order is never turned.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as nnf
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask

pytest.importorskip("transformers", reason="the pipelines of diffusers need it: pip install 'rollcache[diffusers]'")
pytest.importorskip("diffusers", reason="the real classes are needed: pip install 'rollcache[diffusers]'")

from diffusers.models.transformers import transformer_anyflow_far

from rollcache.adapters.check import check_adapter

FAMILIES = {
    "SkyReels-V2": {"branches": 2},
    "Helios": {"branches": 2},
    "FramePack": {},
    "AnyFlow-FAR": {},
    "SANA-WM refiner": {},
}


@pytest.fixture(scope="module")
def benchmark() -> Any:
    path = Path(__file__).parent.parent / "benchmarks" / "adapters.py"
    spec = importlib.util.spec_from_file_location("benchmark_adapters", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["benchmark_adapters"] = module
    spec.loader.exec_module(module)
    return module


class Attention:
    """Attention under the mask of a flex attention, which is slow on a CPU."""

    def __init__(self) -> None:
        self.masks: dict[tuple[int, int], Tensor] = {}

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, scale: Any = None, **_: Any) -> Tensor:
        if attn_mask is not None:
            size = attn_mask.seq_lengths
            if size not in self.masks:  # one chunk more, other lengths
                self.masks[size] = create_mask(attn_mask.mask_mod, None, None, *size, device="cpu")
            attn_mask = self.masks[size]
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return nnf.scaled_dot_product_attention(q, k, v, attn_mask, scale=scale).transpose(1, 2)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_adapter_says_the_truth(benchmark: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformer_anyflow_far, "dispatch_attention_fn", Attention())
    scale = benchmark.Scale(depth=3, heads=2, head=16, frames=(2, 2, 3), cells=(2, 2), steps=2)
    family = benchmark.FAMILIES[name](scale, **FAMILIES[name])
    report = check_adapter(family.model, family.calls, adapter=family.adapter)
    report.raise_for_failures()
    skipped = {f.name for f in report.findings if f.status == "skipped"}
    assert skipped <= {"order of branches", "repair of all tokens"}, str(report)


def test_a_small_run_is_measured_against_what_its_blocks_cost(benchmark: Any) -> None:
    scale = benchmark.Scale(depth=2, heads=2, head=16, frames=(1, 1), cells=(2, 2), steps=2)
    settings = benchmark.Settings(scale=scale, rounds=1, anchors=1)
    across_steps, across_chunks = (benchmark.measure(name, settings) for name in ("SkyReels-V2", "SANA-WM refiner"))
    assert across_steps["exact"] and across_chunks["exact"]
    assert (across_steps["calls"], across_steps["commits"], across_steps["skipped"]) == (4, 0, 0.5)
    assert (across_chunks["calls"], across_chunks["commits"]) == (7, 2)
    assert across_chunks["skipped"] == pytest.approx(2 * 0.5 / 7)  # block 1 of 2, in the 2 steps of the second chunk
    assert across_steps["ceiling"] > 1
    assert benchmark.table([across_steps, across_chunks], scale).row_count == 2


def test_ceiling_and_efficiency_by_hand(benchmark: Any) -> None:
    full, stack = [[10.0, 11.0, 10.0], [10.0] * 3], [[8.0] * 3, [8.0] * 3]
    found = benchmark.reached(full, stack, [[10.0] * 3, [4.0, 4.0, 99.0]], [0.0, 1.0])
    assert found == pytest.approx({"speedup": 20 / 14, "ceiling": 20 / 12, "efficiency": 12 / 14})


def test_unknown_families_are_named(benchmark: Any) -> None:
    with pytest.raises(ValueError, match="unknown families: Foo"):
        benchmark.Settings(families=("Foo",))
