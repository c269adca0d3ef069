#!/usr/bin/env bash
# Makes the virtual environment given as the first argument. Where Python's venv module is missing (Debian ships
# it apart), it is installed when we are root, and named exactly when we are not.
set -euo pipefail

venv=$1
python=${PYTHON:-python3}

say() { printf '%s\n' "$*" >&2; }

has_venv() { "$python" -c 'import ensurepip, venv' 2>/dev/null; }

if ! command -v "$python" >/dev/null || ! has_venv; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        # shellcheck source=scripts/apt.sh
        . "$(dirname "$0")/apt.sh"
        apt_install python3 python3-venv
    fi
fi
if ! command -v "$python" >/dev/null || ! has_venv; then
    say "Python with its venv module is missing. Install it, then run make again:"
    say "    sudo apt-get install python3 python3-venv"
    say "or name another Python:  make PYTHON=/path/to/python3.11"
    exit 1
fi
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    say "Holdfast needs Python 3.11 or newer; $python is $("$python" --version 2>&1)."
    say "Name another Python:  make PYTHON=/path/to/python3.11"
    exit 1
fi

"$python" -m venv --clear "$venv"
