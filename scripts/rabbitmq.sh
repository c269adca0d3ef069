#!/usr/bin/env bash
# Makes a folder with a newer RabbitMQ beside Debian 12's: `rabbitmq.sh trixie` (4.0) or `rabbitmq.sh sid` (4.3).
# It needs root, apt and about a minute; the folder (about 300 MB) is kept in HOLDFAST_CACHE, ~/.cache/holdfast.
# Nothing in it is started or mounted here: the tests do that, each in a mount namespace that ends with them.
set -euo pipefail

suite=$1
cache=${HOLDFAST_CACHE:-$HOME/.cache/holdfast}
root=$cache/rabbitmq-$suite
server=usr/lib/rabbitmq/bin/rabbitmq-server

say() { printf '%s\n' "$*" >&2; }

if [ -x "$root/$server" ]; then exit 0; fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    say "RabbitMQ of Debian $suite needs a debootstrap folder, and that needs root and apt."
    exit 1
fi

# shellcheck source=scripts/apt.sh
. "$(dirname "$0")/apt.sh"
command -v debootstrap >/dev/null || apt_install debootstrap

# The mirror that this machine uses for Debian itself, whatever it is.
mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Origin: Debian' | head -n 1)
say "Making $root ..."
mkdir -p "$cache"
made=$(mktemp -d "$cache/making-$suite.XXXXXX")
trap 'rm -rf "$made"' EXIT
chmod 755 "$made"
debootstrap --variant=minbase "$suite" "$made" "$mirror" >"$cache/debootstrap-$suite.log" 2>&1
printf '#!/bin/sh\nexit 101\n' >"$made/usr/sbin/policy-rc.d"
chmod +x "$made/usr/sbin/policy-rc.d"
# A mirror may lag behind the lifetime of sid's lists; the signatures are checked all the same.
chroot "$made" env DEBIAN_FRONTEND=noninteractive sh -c '
    apt-get -o Acquire::Check-Valid-Until=false update --quiet=2 &&
    apt-get install --yes --quiet=2 --no-install-recommends rabbitmq-server &&
    apt-get clean && rm -rf /var/lib/apt/lists/*' >>"$cache/debootstrap-$suite.log" 2>&1
echo '127.0.0.1 localhost' >"$made/etc/hosts"
mv --no-target-directory "$made" "$root"
trap - EXIT
