"""A row of a parametrized test that is run by `make test-slow` alone."""

from __future__ import annotations

from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """The row of these values, one for each name of the parameters."""
    return pytest.param(*values, marks=pytest.mark.slow)
