#!/usr/bin/env bash
# Makes sure that the servers and the browser which the tests start are installed. It starts none: the tests run private
# ones.
# As root with apt it installs what is missing; otherwise it names exactly what to install, and fails.
# HOLDFAST_TEST_WITHOUT=postgres,rabbitmq,browser (comma-separated) leaves a server out, and its tests with it.
set -euo pipefail

say() { printf '%s\n' "$*" >&2; }

wanted() { case ",${HOLDFAST_TEST_WITHOUT:-}," in *",$1,"*) return 1 ;; esac; }

# Versions below 15 do not count: that is what the tests are written for.
have_postgres() {
    local folder
    for folder in "${HOLDFAST_TEST_POSTGRES_BIN:-}" /usr/lib/postgresql/*/bin /usr/local/pgsql/bin /usr/local/bin /usr/bin; do
        if [ -n "$folder" ] && [ -x "$folder/initdb" ] && [ -x "$folder/postgres" ] &&
            [ "$("$folder/postgres" --version | sed -E 's/[^0-9]*([0-9]+).*/\1/')" -ge 15 ]; then
            return
        fi
    done
    return 1
}

# Debian's package makes and starts a cluster of its own when it is installed; nobody asked for that one. Where
# postgresql-common is there already, its settings are somebody's, and stay.
install_postgres() {
    local settings=/etc/postgresql-common/createcluster.conf
    if [ ! -e "$settings" ]; then
        apt_install postgresql-common
        echo 'create_main_cluster = false' >>"$settings"
    fi
    apt_install postgresql
}

have_rabbitmq() { command -v openssl >/dev/null && [ -x "${HOLDFAST_TEST_RABBITMQ_BIN:-/usr/lib/rabbitmq/bin}/rabbitmq-server" ]; }

# Debian's package starts a node of its own when it is installed, on the ports of a real one, and at every boot after.
install_rabbitmq() {
    local policy=/usr/sbin/policy-rc.d ours='' failed=0
    if [ ! -e "$policy" ]; then
        printf '#!/bin/sh\nexit 101\n' >"$policy"
        chmod +x "$policy"
        ours=yes
    fi
    apt_install rabbitmq-server openssl || failed=1
    if [ -n "$ours" ]; then rm -f "$policy"; fi
    if command -v systemctl >/dev/null; then
        systemctl disable --quiet rabbitmq-server.service epmd.service epmd.socket 2>/dev/null || true
    fi
    return "$failed"
}

# Debian's own. One that somebody else has built is named by HOLDFAST_TEST_CHROMIUM.
have_browser() { [ -x "${HOLDFAST_TEST_CHROMIUM:-/usr/bin/chromium}" ]; }

install_browser() { apt_install chromium; }

# A further server: have_NAME, install_NAME, and its line here. After the name: what a person would install.
servers=(
    "postgres postgresql"
    "rabbitmq rabbitmq-server openssl"
    "browser chromium"
)

for line in "${servers[@]}"; do
    read -r name packages <<<"$line"
    if ! wanted "$name" || "have_$name"; then continue; fi
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        say "Installing $packages with apt-get ..."
        # shellcheck source=scripts/apt.sh
        . "$(dirname "$0")/apt.sh"
        "install_$name" || say "apt-get failed."
    fi
    if ! "have_$name"; then
        say "The tests need what is not installed: $name. Install it, then run make again:"
        say "    sudo apt-get install $packages"
        say "or leave its tests out:  HOLDFAST_TEST_WITHOUT=$name make test"
        exit 1
    fi
done

# RabbitMQ 4 loses messages in ways that Debian 12's 3.10 does not know, so its tests run there too, where that can be
# made. HOLDFAST_TEST_RABBITMQ=4.0,4.3 names the versions that must not be missing; the tests insist on them.
if wanted rabbitmq; then
    suites=trixie
    case ",${HOLDFAST_TEST_RABBITMQ:-}," in *,4.3,*) suites="trixie sid" ;; esac
    for suite in $suites; do
        timeout 600 bash "$(dirname "$0")/rabbitmq.sh" "$suite" || say "The tests run without RabbitMQ of Debian $suite."
    done
fi
