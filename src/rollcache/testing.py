"""For the tests of adapters: `assert_adapter`. Needs torch alone, and works under any test runner.

```python
def test_my_adapter_says_the_truth():
    assert_adapter(MyModel(depth=3, width=16), my_loop)
```
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from rollcache.adapters.check import AdapterReport, check_adapter
from rollcache.adapters.rehearse import Calls
from rollcache.adapters.spec import Adapter


def assert_adapter(
    model: nn.Module,
    make_inputs: Callable[..., Calls],
    *,
    adapter: Adapter | None = None,
    may_skip: bool = True,
) -> AdapterReport:
    """Fail unless `check_adapter` finds nothing wrong.

    Args:
        model: see `check_adapter`.
        make_inputs: see `check_adapter`.
        adapter: see `check_adapter`.
        may_skip: whether a check may be skipped because the rollout shows nothing of it.

    Raises:
        AssertionError: with the whole report.
    """
    report = check_adapter(model, make_inputs, adapter=adapter)
    complete = may_skip or all(f.status != "skipped" for f in report.findings)
    if not (report.passed and complete):
        raise AssertionError(str(report))
    return report
