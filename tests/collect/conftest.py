"""One bucket for the run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.collect.shared import Bucket, running_bucket


@pytest.fixture(scope="session")
def bucket() -> Iterator[Bucket]:
    """S3, as moto serves it."""
    with running_bucket() as made:
        yield made
