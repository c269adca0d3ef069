"""`make bench`: every measurement, or those that are named; exit code 1 when a must is missed."""

from __future__ import annotations

import argparse
import importlib
import sys

BENCHES = (
    "cycle",
    "http",
    "depth",
    "postgres",
    "procrastinate_peer",
    "move",
    "consumers",
    "recover",
    "collect",
    "vault",
    "custody",
    "console",
    "start",
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*BENCHES, []], help="which ones; all by default")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="smaller sizes")
    arguments = parser.parse_args()
    met = True
    for name in arguments.names or BENCHES:
        met &= importlib.import_module(f"bench.{name}").main(rounds=arguments.rounds, quick=arguments.quick)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
