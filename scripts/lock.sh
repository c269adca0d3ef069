#!/usr/bin/env bash
# Pins names, versions and hashes, and nothing else: no index address and no folder of the machine that ran this.
# The sets are pinned from the largest to the smallest, each held to the one before, so that no two disagree.
set -euo pipefail
cd "$(dirname "$0")/.."

compile() {
    local set=$1
    shift
    env -u PIP_FIND_LINKS -u UV_FIND_LINKS "${UV:-uv}" pip compile --quiet --upgrade --universal \
        --python-version 3.11 --generate-hashes --no-header --no-annotate --no-emit-index-url \
        "$@" --output-file "requirements/$set.txt"
}

compile bench --extra dev --extra bench pyproject.toml
compile dev --extra dev --constraint requirements/bench.txt pyproject.toml
compile run --constraint requirements/bench.txt pyproject.toml
echo hatchling | compile build --constraint requirements/bench.txt -

if grep -nE '://|find-links|index-url' requirements/*.txt; then
    echo "an address got into the pinned requirements (see above)" >&2
    exit 1
fi
