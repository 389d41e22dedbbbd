#!/usr/bin/env bash
# Makes .venv in the root of the clone and installs what the lock names, then racktwin itself, editable.
#
#   venv.sh run    what the daemon needs        (requirements.lock)
#   venv.sh dev    the tests' and linters' too  (requirements-dev.lock)
#   venv.sh dev torch   an extra on top         (requirements-torch.txt, with the lock as a constraint)
#
# A stamp, written last, holds what was installed: a second run changes nothing, and an interrupted one starts
# afresh. An extra has a stamp of its own: once there it stays, whether or not a later run names it.
# PYTHON=python3.12 chooses the interpreter. Only bash, coreutils, grep, sed and Python >= 3.11 are
# taken for granted.
set -euo pipefail

level=${1:-run}
asked=${*:2}
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
unset PYTHONHOME PYTHONPATH PIP_USER PIP_TARGET PIP_PREFIX PIP_REQUIRE_VIRTUALENV
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_ROOT_USER_ACTION=ignore

readonly VENV=.venv OLDEST=3.11
readonly UNFINISHED=$VENV/.unfinished PLACE=$VENV/.place

case $level in
    run) lock=requirements.lock ;;
    dev) lock=requirements-dev.lock ;;
    *) echo "venv.sh: expected 'run' or 'dev', got '$level'" >&2; exit 2 ;;
esac

exec 3>&2 # a message reaches the user even where output goes to the log
say() { printf '%s\n' "$*" >&3; }
die() { say "set-up: $*"; exit 1; }

# An extra is known if it has a file of requirements.
extras=()
read -ra named <<<"${asked//,/ }"
for extra in "${named[@]}"; do
    if [[ ! $extra =~ ^[a-z0-9]+$ || ! -f requirements-$extra.txt ]]; then
        known=$(printf '%s\n' requirements-*.txt | sed 's/^requirements-//; s/\.txt$//' | paste -sd ' ')
        die "unknown extra '$extra'; expected EXTRAS to be none or some of: $known"
    fi
    extras+=("$extra")
done

# "3.12" if the interpreter runs and is new enough, else nothing.
usable() {
    "$1" -I -S -c 'import sys; v = sys.version_info; v >= (3, 11) and print(f"{v[0]}.{v[1]}")' 2>/dev/null || true
}

# What was found of an interpreter, for the message that says what was expected.
found() {
    local version
    version=$("$1" -I -S -c 'import sys; print(sys.version.split()[0])' 2>/dev/null) || version="absent or broken"
    printf '%s (%s)' "$1" "$version"
}

# Sets `python`: $PYTHON if given, else the first new enough one that can make an environment, else the first.
choose_python() {
    local candidate seen=()
    python=
    if [[ -n ${PYTHON:-} ]]; then
        [[ -n $(usable "$PYTHON") ]] || die "expected Python >= $OLDEST, found PYTHON=$(found "$PYTHON")"
        python=$PYTHON
        return
    fi
    for candidate in python3.13 python3.12 python3.11 python3; do
        seen+=("$(found "$candidate")")
        [[ -n $(usable "$candidate") ]] || continue
        python=${python:-$candidate}
        if "$candidate" -I -c 'import ensurepip, venv' 2>/dev/null; then
            python=$candidate
            return
        fi
    done
    [[ -n $python ]] || die "expected Python >= $OLDEST, found$(printf ' %s,' "${seen[@]}" | sed 's/,$//')." \
        "Remedy: apt-get install python3 python3-venv, or make PYTHON=/path/to/python3.11"
}

has_pip() { "$VENV/bin/python" -m pip --version >/dev/null 2>&1; }

# One way to make the environment; leaves nothing behind if it fails.
attempt() {
    rm -rf "$VENV"
    if "$@" >>"$log" 2>&1 && has_pip; then return 0; fi
    rm -rf "$VENV"
    return 1
}

with_venv() { "$python" -m venv "$VENV"; }
with_virtualenv() { "$python" -m virtualenv -q "$VENV"; }
with_virtualenv_command() { virtualenv -q -p "$(command -v "$python")" "$VENV"; }
with_borrowed_pip() { # the system's pip fills an empty environment
    "$python" -m venv --without-pip "$VENV" && "$python" -m pip --python "$VENV/bin/python" install -q pip
}
with_fetched_virtualenv() { # for a Python whose venv module is missing altogether
    "$python" -m pip install -q --target build/virtualenv virtualenv &&
        PYTHONPATH=build/virtualenv "$python" -m virtualenv -q "$VENV"
}
with_apt() {
    local version packages
    [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null || return 1
    version=$(usable "$python")
    packages=(python3-venv)
    [[ $(usable python3) == "$version" ]] || packages=("python$version-venv")
    say "set-up: $python cannot make environments: installing ${packages[*]} with apt-get"
    apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -q -y "${packages[@]}" &&
        "$python" -m venv "$VENV"
}

make_environment() {
    local way
    choose_python
    say "set-up: making $VENV with $(found "$python")"
    mkdir -p build
    log=build/setup.log
    : >"$log"
    for way in with_venv with_virtualenv with_virtualenv_command with_borrowed_pip with_fetched_virtualenv with_apt; do
        if attempt "$way"; then return; fi
    done
    die "$python can make no virtual environment: neither venv nor virtualenv nor pip work (see $log)." \
        "Remedy: apt-get install python3-venv"
}

# The version of a sound .venv that suits $PYTHON, else nothing. An environment that was moved is not sound.
present() {
    [[ -x $VENV/bin/python && ! -e $UNFINISHED ]] || return 0
    [[ ! -e $PLACE || $(<"$PLACE") == "$(pwd -P)" ]] || return 0
    local have
    have=$(usable "$VENV/bin/python")
    [[ -z ${PYTHON:-} || $have == "$(usable "$PYTHON")" ]] || return 0
    printf '%s' "$have"
}

# What an environment of a level is made from.
fingerprint() {
    { printf '%s\n' "$1"; cat "$2" pyproject.toml hatch_build.py twin/kernels/native.c deploy/setup/venv.sh; } | sha256sum | cut -d' ' -f1
}

stamped() {
    local version=$1
    [[ -n $version ]] || return 1
    local dev run
    dev="$version $(fingerprint dev requirements-dev.lock)"
    run="$version $(fingerprint run requirements.lock)"
    [[ -f $VENV/.stamp ]] || return 1
    local stamp
    stamp=$(<"$VENV/.stamp")
    [[ $stamp == "$dev" || ($level == run && $stamp == "$run") ]]
}

# What an extra is made from: what it names, and what it must leave as it is.
extra_fingerprint() {
    { printf '%s\n' "$1"; cat "requirements-$1.txt" requirements-dev.lock; } | sha256sum | cut -d' ' -f1
}

extra_stamped() {
    local version=$1 stamp=$VENV/.stamp-$2
    [[ -n $version && -f $stamp && $(<"$stamp") == "$version $(extra_fingerprint "$2")" ]]
}

all_stamped() {
    local version extra
    version=$(present)
    stamped "$version" || return 1
    for extra in "${extras[@]}"; do extra_stamped "$version" "$extra" || return 1; done
}

install() {
    local started=$SECONDS python=$VENV/bin/python
    rm -f "$VENV/.stamp"
    touch "$UNFINISHED"
    pwd -P >"$PLACE"
    say "set-up: installing $(grep -c '^[a-z]' "$lock") packages of $lock"
    "$python" -m pip install -qq --require-hashes --only-binary :all: -r "$lock"
    "$python" -m pip install -qq --no-deps --no-build-isolation -e .
    "$python" -m compileall -q twin policies connectors models >/dev/null # so that the first start is no slower
    rm -f "$UNFINISHED"
    printf '%s %s\n' "$(usable "$python")" "$(fingerprint "$level" "$lock")" >"$VENV/.stamp.new"
    mv "$VENV/.stamp.new" "$VENV/.stamp"
    say "set-up: done in $((SECONDS - started)) s"
}

contents() { ls "$VENV"/lib/python*/site-packages; }

# A download that failed or was given up has changed nothing: the environment is as sound as before.
forgive_if_unchanged() {
    if [[ $(contents) == "$contents_before" ]]; then rm -f "$UNFINISHED"; fi
}

install_extra() {
    local extra=$1 started=$SECONDS python=$VENV/bin/python
    local wanted=requirements-$extra.txt limits=$VENV/.limits
    # Without hashes: with them pip would want one of every package, and builds of an extra differ.
    sed -n 's/^\([a-z].*==.*[^ ]\) *\\$/\1/p' requirements-dev.lock >"$limits"
    rm -f "$VENV/.stamp-$extra"
    contents_before=$(contents)
    trap forgive_if_unchanged EXIT
    touch "$UNFINISHED"
    say "set-up: installing the extra '$extra' of $wanted (may be large)"
    "$python" -m pip install -qq --only-binary :all: -c "$limits" -r "$wanted" ||
        die "the extra '$extra' could not be installed; without EXTRAS the tests that want it are skipped"
    rm -f "$UNFINISHED"
    trap - EXIT
    printf '%s %s\n' "$(usable "$python")" "$(extra_fingerprint "$extra")" >"$VENV/.stamp-$extra"
    say "set-up: '$extra' done in $((SECONDS - started)) s"
}

main() {
    local extra
    if [[ -n ${PYTHON:-} && -z $(usable "$PYTHON") ]]; then choose_python; fi
    if all_stamped; then return; fi
    if command -v flock >/dev/null; then # two makes at once: the second waits, then finds the work done
        mkdir -p build
        exec 9>build/setup.lock
        flock 9
    fi
    if ! stamped "$(present)"; then
        if [[ -z $(present) ]]; then make_environment; fi
        has_pip || make_environment
        install
    fi
    for extra in "${extras[@]}"; do
        extra_stamped "$(present)" "$extra" || install_extra "$extra"
    done
}

main
