#!/usr/bin/env bash
# Installs the servers that the tests start for themselves: Debian packages, where apt has them.
#
# Does nothing when all are there. Without root it lists the missing packages. Nothing is started or left enabled:
# the tests run their own on loopback. With CI=true an installation that fails is an error; elsewhere it is a
# message, since tests skip by name what is not there.
set -euo pipefail

readonly PACKAGES=(
    mosquitto mosquitto-clients victoria-metrics etcd-server etcd-client slurmctld slurmd slurm-client munge
    systemd-container nats-server prometheus prometheus-alertmanager ipmitool zsh fish chromium
)
readonly POLICY=${RACKTWIN_POLICY_FILE:-/usr/sbin/policy-rc.d}

say() { printf 'servers: %s\n' "$*" >&2; }

installed() { [[ $(dpkg-query -W -f '${Status}' "$1" 2>/dev/null) == "install ok installed" ]]; }

in_ci() { [[ ${CI:-} =~ ^(1|true|yes)$ ]]; }

# A missing package is an error only in CI.
give_up() {
    say "$*"
    if in_ci; then exit 1; fi
    exit 0
}

if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
    say "no apt here; tests that want one of ${PACKAGES[*]} are skipped unless it is on the PATH"
    exit 0
fi

missing=()
for package in "${PACKAGES[@]}"; do
    installed "$package" || missing+=("$package")
done
if [[ ${#missing[@]} == 0 ]]; then exit 0; fi

# A package that this release does not have is looked for once, not at every `make test`.
stamp=build/servers.absent
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
if [[ -f $stamp && $(<"$stamp") == "${missing[*]}" && -n $(find "$stamp" -mmin -1440) ]]; then exit 0; fi

if [[ $(id -u) != 0 ]]; then
    say "missing: ${missing[*]}. Remedy: sudo apt-get install ${missing[*]}"
    exit 0
fi

made_policy=
restore() {
    if [[ -n $made_policy ]]; then rm -f "$POLICY"; fi
}
trap restore EXIT
if [[ ! -e $POLICY ]]; then # 101: starting a service is forbidden
    printf '#!/bin/sh\nexit 101\n' >"$POLICY"
    made_policy=yes
    chmod 755 "$POLICY"
fi

mkdir -p build
log=build/servers.log
export DEBIAN_FRONTEND=noninteractive
apt-get update -q >"$log" 2>&1 || give_up "apt-get update failed: $(tail -n 1 "$log") (see $log)"

wanted=() absent=()
for package in "${missing[@]}"; do
    candidate=$(apt-cache policy "$package" 2>/dev/null | awk '$1 == "Candidate:" {print $2}')
    if [[ -n $candidate && $candidate != "(none)" ]]; then wanted+=("$package"); else absent+=("$package"); fi
done

if [[ ${#wanted[@]} != 0 ]]; then
    say "installing ${wanted[*]}"
    apt-get install -q -y --no-install-recommends "${wanted[@]}" >>"$log" 2>&1 ||
        give_up "apt-get install failed: $(grep -m 1 '^E:' "$log" || tail -n 1 "$log") (see $log)"
    if command -v systemctl >/dev/null; then # installing them enables them
        for package in "${wanted[@]}"; do
            while read -r unit; do
                systemctl disable -q "${unit##*/}" >>"$log" 2>&1 || true
            done < <(dpkg -L "$package" | grep -E '/systemd/system/[^/@]+\.(service|socket|timer)$' || true)
        done
    fi
fi
if [[ ${#absent[@]} != 0 ]]; then say "not in this release: ${absent[*]}; tests skip them by name"; fi
printf '%s\n' "${absent[*]}" >"$stamp"
