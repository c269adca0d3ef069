"""One bucket for the run: S3, as moto serves it."""

from __future__ import annotations

import pytest

from tests.collect import shared

bucket = pytest.fixture(scope="session")(shared.bucket)
