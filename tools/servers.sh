#!/usr/bin/env bash
# Make sure that Debian packages are installed, without asking.
#
#   tools/servers.sh              the servers that the engines' tests start
#   tools/servers.sh PACKAGE...   these packages instead
#
# Present packages cost no network and no rights. Where something is missing and cannot be installed this says so in one
# line and still succeeds: the tests of that engine then skip with their reason, or fail when CI is set.
set -euo pipefail

servers=(
    redis-server
    etcd-server
    etcd-client # etcdctl, to compare with
    zookeeper
    postgresql-15
    pgbouncer
    mariadb-server
    faketime # false clocks
    prometheus # also promtool, which tests the alerting rules
    prometheus-alertmanager # amtool
    tmux # a terminal for `leasehold top`
    chromium # a browser for the dashboard
    zsh # shells that complete commands
    fish
    man-db # renders the manual pages
)

wanted=("$@")
if [ $# = 0 ]; then wanted=(${servers[@]+"${servers[@]}"}); fi

missing=()
for package in ${wanted[@]+"${wanted[@]}"}; do
    state=$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null || true)
    [ "$state" = installed ] || missing+=("$package")
done
if [ ${#missing[@]} = 0 ]; then exit 0; fi

give_up() {
    echo "not installed: ${missing[*]} ($1); install by hand: apt-get install ${missing[*]}" >&2
    exit 0
}

command -v apt-get >/dev/null || give_up "this system has no apt-get"
as_root=()
if [ "$(id -u)" != 0 ]; then
    sudo -n true 2>/dev/null || give_up "this needs root or sudo without a password"
    as_root=(sudo -n)
fi

apt() {
    ${as_root[@]+"${as_root[@]}"} env DEBIAN_FRONTEND=noninteractive \
        apt-get -qq -o DPkg::Lock::Timeout=120 -o Acquire::Retries=1 -o Dpkg::Use-Pty=0 "$@" </dev/null
}
install() { apt install -y --no-install-recommends "${missing[@]}" >"$log" 2>&1; }

log=$(mktemp)
trap 'rm -f "$log"' EXIT
echo "installing ${missing[*]}" >&2
# The package lists may be absent or old: fetch them only when the first try fails.
install || { apt update >"$log" 2>&1 && install; } || give_up "apt-get: $(grep -m 1 '^E:' "$log" || echo failed)"
