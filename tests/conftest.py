from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def street_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from street_doubles import random_weights

    return random_weights(tmp_path_factory.mktemp("weights"))
