"""Interleaved rounds: every variant once a round, in random order; ratios are taken within a round.

These machines are noisy: a figure means little, the median of paired ratios with its spread means something.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

ROUNDS_MIN = 5


class Target(NamedTuple):
    """`variant` shall be at least `must` times `base`, and would like to be `aim`."""

    variant: str
    base: str
    must: float
    aim: float


def run(name: str, variants: Mapping[str, Callable[[], float]], *, rounds: int) -> dict[str, list[float]]:
    """Run every variant `rounds` times, shuffled within each round; returns their rates."""
    rates: dict[str, list[float]] = {variant: [] for variant in variants}
    for number in range(rounds):
        order = list(variants)
        random.shuffle(order)
        for variant in order:
            rate = variants[variant]()
            rates[variant].append(rate)
            print(f"  {name} round {number + 1}/{rounds} {variant}: {rate:,.0f}/s", file=sys.stderr, flush=True)
    return rates


def report(name: str, rates: Mapping[str, Sequence[float]], targets: Sequence[Target]) -> bool:
    """Print a table and one JSON line; returns whether every `must` is met."""
    print(f"\n{name}")
    for variant, values in rates.items():
        print(f"  {variant:42} {statistics.median(values):>12,.0f}/s  [{min(values):,.0f} .. {max(values):,.0f}]")
    met = True
    for target in targets:
        ratios = sorted(a / b for a, b in zip(rates[target.variant], rates[target.base], strict=True))
        median = statistics.median(ratios)
        verdict = "aim met" if median >= target.aim else "must met" if median >= target.must else "MISSED"
        met = met and median >= target.must
        print(
            f"  {target.variant} / {target.base}: {median:.2f} [{ratios[0]:.2f} .. {ratios[-1]:.2f}]"
            f"  must {target.must:g}, aim {target.aim:g}: {verdict}"
        )
        line = {
            "bench": name,
            "variant": target.variant,
            "base": target.base,
            "ratio": round(median, 3),
            "spread": [round(ratios[0], 3), round(ratios[-1], 3)],
            "rounds": len(ratios),
            "must": target.must,
            "aim": target.aim,
        }
        print(json.dumps(line))
    return met
