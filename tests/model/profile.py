"""How long the model tests run: short in `make test`, as long as asked in `make soak`."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

STEPS_COUNT = 40


def settings_for(*, examples: int, steps: int = STEPS_COUNT) -> settings:
    """No deadline per step: a step may wait for a disk. A failure prints how to repeat it."""
    return settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )
