# Sourced, not run: apt_install PACKAGE... without questions, refreshing the package lists only when they are needed.
apt_install() {
    export DEBIAN_FRONTEND=noninteractive
    apt-get install --yes --quiet=2 --no-install-recommends "$@" >&2 && return
    apt-get update --quiet=2 >&2
    apt-get install --yes --quiet=2 --no-install-recommends "$@" >&2
}
