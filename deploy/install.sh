#!/usr/bin/env bash
# Installs racktwin on a management host (Debian 12, Ubuntu 24.04), or brings it up to date. Run it as root
# from a checkout. A second run changes nothing that is in order; it keeps configuration and state.
#
#   deploy/install.sh                  /opt/racktwin, user racktwin, /etc/racktwin, the systemd unit
#   deploy/install.sh --wheel FILE     this wheel instead of the checkout's packages
#   deploy/install.sh --restart        restart the service if it runs and something changed
#   deploy/install.sh --uninstall      remove programs and unit; configuration, state and user stay
#
#   --prefix DIR    instead of /opt/racktwin         --python PROGRAM   interpreter (>= 3.11, in no home)
#   --destdir DIR   try it below DIR; no user, no systemd
#   --venv DIR      use this virtual environment as it is, instead of making one
set -euo pipefail
umask 022 # the service's programs must be readable by its user and writable only by root, for any caller

source_dir=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
prefix=/opt/racktwin destdir='' wheel='' venv='' python='' restart='' action=install
readonly USER_NAME=racktwin ETC=/etc/racktwin STATE=/var/lib/racktwin
readonly parts=(twin policies connectors models deploy/agent/racktwin_agent) # of the wheel
readonly UNIT_PATH=/usr/local/lib/systemd/system/racktwin.service

say() { printf 'racktwin: %s\n' "$*"; }
die() { printf 'racktwin: %s\n' "$*" >&2; exit 1; }

while [[ $# -gt 0 ]]; do
    case $1 in
        --prefix | --destdir | --wheel | --venv | --python)
            [[ $# -ge 2 ]] || die "$1: expected a value"
            name=${1#--}
            printf -v "$name" '%s' "$2"
            shift 2
            ;;
        --restart) restart=yes; shift ;;
        --uninstall) action=uninstall; shift ;;
        -h | --help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"; exit 0 ;;
        *) die "unknown argument $1; see --help" ;;
    esac
done

[[ $prefix =~ ^/[A-Za-z0-9._/+-]+$ && $prefix != *..* ]] ||
    die "--prefix: expected an absolute path of plain characters, got '$prefix'"
prefix=${prefix%/}
[[ -z $destdir || $destdir == /* ]] || destdir=$PWD/$destdir
[[ -n $destdir || $(id -u) == 0 ]] || die "expected to run as root: it adds a user and a systemd unit"
[[ -z $wheel || -f $wheel ]] || die "--wheel: $wheel: no such file"
[[ -z $venv || -x $venv/bin/racktwin ]] || die "--venv: expected $venv/bin/racktwin"
wheel=${wheel:+$(realpath "$wheel")}
home=$destdir$prefix
readonly MARK=$home/.installed-by-racktwin
changed=

# True if a running systemd must be reloaded.
systemd_runs() { [[ -z $destdir && -d /run/systemd/system ]]; }

# put MODE GROUP FILE TARGET: only if it differs.
put() {
    local mode=$1 group=$2 target=$4
    if cmp -s "$3" "$target" && [[ $(stat -c %a "$target") == "$mode" ]]; then return 1; fi
    mkdir -p "$(dirname "$target")"
    install -m "$mode" "$3" "$target.new"
    own "$group" "$target.new"
    mv -f "$target.new" "$target"
}

own() { if [[ -z $destdir ]]; then chown "root:$1" "$2"; fi; }

choose_python() {
    local candidate base hidden=''
    for candidate in ${python:-python3.13 python3.12 python3.11 python3 /usr/bin/python3 /usr/local/bin/python3}; do
        if ! "$candidate" -I -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>&-; then
            continue
        fi
        # The unit has ProtectHome=yes, so the service cannot see a home directory (pyenv, for example).
        base=$("$candidate" -I -c 'import os, sys; print(os.path.realpath(sys.base_prefix))' 2>&-)/
        if [[ $base =~ ^/(root|home|run/user)/ ]]; then
            hidden=${base%/}
            continue
        fi
        python=$(command -v "$candidate")
        return
    done
    [[ -z $hidden ]] || die "the Python in $hidden is in a home directory, which the service cannot read;" \
        "expected another (--python /usr/bin/python3). Remedy: apt-get install python3-venv"
    die "expected Python >= 3.11 with venv${python:+, got $python}. Remedy: apt-get install python3-venv"
}

# Hash of the inputs of an environment; other inputs need another environment.
fingerprint() {
    {
        "$python" -I -c 'import sys; print(sys.version, sys.prefix)'
        cat "$source_dir/requirements.lock"
        if [[ -n $wheel ]]; then
            cat "$wheel"
        else
            cd "$source_dir"
            find pyproject.toml hatch_build.py "${parts[@]}" -type f -not -path '*/__pycache__/*' -not -name '*.so' \
                -print0 | LC_ALL=C sort -z | xargs -0 sha256sum
        fi
    } | sha256sum | cut -c1-16
}

# Creates an environment beside the one in use and switches a link: a failure does not affect the running service.
make_environment() {
    local new link=$home/venv before
    if [[ -n $venv ]]; then
        new=$venv
    else
        choose_python
        new=$prefix/venvs/$(fingerprint)
    fi
    before=$(readlink "$link" || true)
    if [[ $before == "$new" && -x $destdir$new/bin/racktwin ]] || [[ -n $venv && $before == "$venv" ]]; then
        say "$prefix/venv is up to date"
        return
    fi
    if [[ -z $venv && ! -e $destdir$new/.complete ]]; then fill_environment "$destdir$new"; fi
    ln -sfn "$new" "$link.new"
    mv -fT "$link.new" "$link"
    changed=yes
    say "$prefix/venv is now $new"
    # Keeps the previous environment for a rollback and removes older ones.
    if [[ -z $venv ]]; then
        find "$home/venvs" -mindepth 1 -maxdepth 1 -not -name "${new##*/}" -not -name "${before##*/}" \
            -exec rm -rf {} +
    fi
}

fill_environment() {
    local target=$1 pip
    say "creating an environment with $python (packages of requirements.lock; takes a minute)"
    rm -rf "$target"
    unfinished=$target
    "$python" -m venv "$target"
    pip=("$target/bin/python" -m pip --disable-pip-version-check --no-input -q)
    export PIP_ROOT_USER_ACTION=ignore
    "${pip[@]}" install --require-hashes --only-binary :all: -r "$source_dir/requirements.lock"
    if [[ -n $wheel ]]; then
        "${pip[@]}" install --no-deps "$wheel"
    else
        local copy
        copy=$(mktemp -d)
        scratch=$copy # building must leave nothing behind in the checkout
        (cd "$source_dir" && cp -r --parents pyproject.toml hatch_build.py LICENSE "${parts[@]}" "$copy")
        "${pip[@]}" install --no-deps --no-build-isolation "$copy"
    fi
    "$target/bin/python" -m compileall -q "$target/lib" >/dev/null || true # some library's data is no Python
    touch "$target/.complete"
    unfinished=
}

make_user() {
    if [[ -n $destdir ]] || getent passwd "$USER_NAME" >/dev/null; then return; fi
    useradd --system --user-group --home-dir "$STATE" --no-create-home --shell /usr/sbin/nologin "$USER_NAME"
    changed=yes
    say "added the system user $USER_NAME"
}

configure() {
    local etc=$destdir$ETC file
    mkdir -p "$etc/secrets"
    chmod 750 "$etc"
    chmod 700 "$etc/secrets"
    own "$USER_NAME" "$etc"
    if [[ -e $etc/racktwin.yaml ]]; then
        say "keeping $ETC/racktwin.yaml"
    else
        # A minimal configuration; it includes services found on this host (a broker, exporters, Slurm)
        "${venv:-$destdir$(readlink "$home/venv")}/bin/racktwin" init "$etc" --yes --for 0s >/dev/null ||
            die "$ETC: cannot create a configuration; create one with: $prefix/venv/bin/racktwin init $ETC"
        for file in racktwin.yaml site.yaml reference.yaml; do
            chmod 640 "$etc/$file"
            own "$USER_NAME" "$etc/$file"
        done
        say "wrote a minimal $ETC/racktwin.yaml and $ETC/site.yaml"
    fi
    mkdir -p "$home/share"
    cp "$source_dir/README.md" "$home/share/"
    rm -f "$home/share/lab.yaml" "$home/share/site.yaml" # of earlier versions
}

install_unit() {
    local unit
    unit=$(mktemp)
    scratch_unit=$unit
    sed "s|/opt/racktwin|$prefix|g" "$source_dir/deploy/systemd/racktwin.service" >"$unit"
    if put 644 root "$unit" "$destdir$UNIT_PATH"; then
        changed=yes
        say "wrote $UNIT_PATH"
    else
        say "$UNIT_PATH is up to date"
    fi
    if systemd_runs; then systemctl daemon-reload; fi
}

finish() {
    local active=
    if systemd_runs && systemctl is-active -q racktwin; then active=yes; fi
    if [[ -z $changed ]]; then
        say "nothing to change"
    elif [[ -n $active && -n $restart ]]; then
        systemctl restart racktwin
        say "restarted the service; its state is in $STATE"
    elif [[ -n $active ]]; then
        say "the service still runs the previous version; next: systemctl restart racktwin"
    else
        say "next: $prefix/venv/bin/racktwin init --force $ETC  (asks for broker and exporters, listens), then"
        say "  $prefix/venv/bin/racktwin daemon check --config $ETC/racktwin.yaml"
        say "  systemctl enable --now racktwin"
    fi
}

uninstall() {
    if systemd_runs; then systemctl disable -q --now racktwin 2>/dev/null || true; fi
    rm -f "$destdir$UNIT_PATH"
    if systemd_runs; then systemctl daemon-reload; fi
    if [[ -e $MARK ]]; then
        rm -rf "$home/venvs" "$home/share"
        rm -f "$home/venv" "$MARK"
        rmdir --ignore-fail-on-non-empty "$home"
        say "removed $prefix and the unit"
    elif [[ -e $home ]]; then
        say "$prefix was not created by this script; it is kept"
    fi
    say "kept: $ETC, $STATE and the user $USER_NAME; remove them yourself when the records are no longer needed"
}

unfinished='' scratch='' scratch_unit=''
clean_up() {
    if [[ -n $unfinished ]]; then rm -rf "$unfinished"; fi
    if [[ -n $scratch ]]; then rm -rf "$scratch"; fi
    if [[ -n $scratch_unit ]]; then rm -f "$scratch_unit"; fi
}
trap clean_up EXIT

if [[ $action == uninstall ]]; then
    uninstall
    exit 0
fi
mkdir -p "$home"
[[ -e $MARK || -z $(ls -A "$home") ]] ||
    die "$prefix exists and was not created by this script; choose another --prefix, or empty it"
touch "$MARK"
make_user
make_environment
configure
install_unit
finish
