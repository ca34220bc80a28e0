#!/usr/bin/env bash
# Puts the pinned environment into .venv, layer by layer; the Makefile calls it before everything it runs.
#
#   requirements/install.sh core [sglang] [dev] [bench]
#
# An installed layer leaves a stamp that is named after the content of its list: a second call does nothing, a changed
# list is installed again. A call that was stopped half-way leaves .venv/.parity/unfinished, and the next one starts
# with an empty environment. PYTHON names the interpreter to use (3.11 or later), VENV another directory than .venv: the
# peers of the benchmarks get one of their own.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly venv=${VENV:-.venv}
readonly state=$venv/.parity
readonly log=$state/pip.log
readonly unfinished=$state/unfinished
readonly began=$state/began # when pip was last started
readonly recent_python='import sys; sys.exit(sys.version_info < (3, 11))'

say() { printf '[setup] %s\n' "$*"; }

fail() {
    printf '[setup] error: %s\n' "$@" >&2
    exit 1
}

list_of() {
    case $1 in
        core) echo requirements/cpu.txt ;;
        sglang) echo requirements/sglang-cpu.txt ;;
        dev) echo requirements/dev.txt ;;
        bench) echo requirements/bench.txt ;;
        *) fail "no layer '$1'; layers: core sglang dev bench" ;;
    esac
}

stamp_of() { # NAME, content on standard input
    printf '%s/%s-%s' "$state" "$1" "$(cksum | tr ' ' '-')"
}

find_python() {
    local candidate
    if [ -n "${PYTHON:-}" ]; then
        "$PYTHON" -c "$recent_python" 2>/dev/null ||
            fail "PYTHON=$PYTHON is not a Python 3.11 or later." "Name one: make PYTHON=/path/to/python3.11 ..."
        command -v "$PYTHON"
        return
    fi
    for candidate in python3.11 python3.12 python3.13 python3 python; do
        if "$candidate" -c "$recent_python" 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    fail "no Python 3.11 or later on PATH." "Install one, or name it: make PYTHON=/path/to/python3.11 ..."
}

venv_works() {
    [ ! -e "$unfinished" ] &&
        "$venv/bin/python" -c "$recent_python" 2>/dev/null &&
        "$venv/bin/python" -m pip --version >/dev/null 2>&1
}

make_venv() {
    local python
    venv_works && return
    python=$(find_python)
    [ -e "$unfinished" ] && say "the last set-up was interrupted: starting with an empty $venv"
    say "making $venv with $python ($("$python" -V))"
    "$python" -m venv --clear "$venv" ||
        fail "$python cannot make a virtual environment." "On Debian and Ubuntu: apt install python3-venv"
    mkdir -p "$state"
}

# New ones, and those that replace another version.
num_installed() { find "$venv/lib" -maxdepth 3 -name '*.dist-info' -newer "$began" | wc -l; }

# One line every five seconds until the caller ends: what pip does, or how far the installation is.
show_progress() {
    local started latest chosen
    started=$SECONDS
    # The sleep must not hold the caller's output open after the caller has ended.
    while sleep 5 </dev/null >/dev/null 2>&1 && kill -0 $$ 2>/dev/null; do
        # What pip chose: more than the list where torch brings packages along, fewer where some are there already.
        chosen=$(grep -m 1 'Installing collected packages' "$log" 2>/dev/null | tr ',' '\n' | wc -l) || true
        if [ "$chosen" -gt 0 ]; then
            latest="installed $(num_installed) of $chosen"
        else
            latest=$(grep -oE '(Collecting|Downloading|Retrying|Building wheel for) ?[^ ]+' "$log" 2>/dev/null | tail -n 1)
        fi
        printf '[setup]   %3d s  %s\n' $((SECONDS - started)) "${latest:-starting pip}"
    done
}

stop_progress() {
    [ -z "${progress_pid:-}" ] || kill "$progress_pid" 2>/dev/null || true
    progress_pid=
}

run_pip() { # PIP_ARGUMENT...
    local status=0
    : >"$log"
    touch "$began"
    show_progress 9>&- &
    progress_pid=$!
    PYTHONUNBUFFERED=1 "$venv/bin/python" -m pip install --no-input --disable-pip-version-check \
        --progress-bar off "$@" >"$log" 2>&1 || status=$?
    stop_progress
    [ "$status" -eq 0 ] || grep -E '^ *(ERROR|error):' "$log" >&2 || tail -n 20 "$log" >&2
    return "$status"
}

install_layer() { # NAME
    local list stamp
    list=$(list_of "$1")
    stamp=$(stamp_of "$1" <"$list")
    [ ! -e "$stamp" ] || return 0
    say "$1: $(grep -c '^[^#]*==' "$list") packages of $list$([ "$1" != core ] || echo ', and what torch brings along')"
    touch "$unfinished"
    # Only torch's own requirements depend on the build that the index serves; everything else is pinned whole.
    if ! run_pip $([ "$1" = core ] || echo --no-deps) -r "$list"; then
        grep -q 'Installing collected packages' "$log" || rm -f "$unfinished" # nothing was changed yet
        fail "pip could not install $list; its log is $log." "Repeat the command to try again."
    fi
    [ "$1" != core ] || "$venv/bin/python" -c 'import torch' ||
        fail "torch was installed but cannot be imported." "See the head of $list for how to get its CPU build."
    rm -f "$state/$1"-* "$unfinished"
    touch "$stamp"
}

install_project() {
    local stamp
    # The path is part of the key: the command's first line names the interpreter by its full path.
    stamp=$({ pwd && cat pyproject.toml; } | stamp_of project)
    [ ! -e "$stamp" ] || return 0
    say "project: parity-rl, editable"
    run_pip --no-deps --no-build-isolation --editable . || fail "pip could not install the project; its log is $log."
    rm -f "$state"/project-*
    touch "$stamp"
}

main() {
    local layer
    [ $# -gt 0 ] || fail "usage: requirements/install.sh core [sglang] [dev] [bench]"
    for layer in "$@"; do list_of "$layer" >/dev/null; done
    case " $* $(uname -s) $(uname -m)" in
        *" sglang "*"Linux x86_64") ;;
        *" sglang "*) fail "the SGLang packages are for Linux on x86-64, this is $(uname -sm)." "Use ENGINE=torch." ;;
    esac
    mkdir -p .cache
    if command -v flock >/dev/null; then
        exec 9>.cache/setup.lock
        flock -n 9 || { say "waiting for another set-up in this directory" && flock 9; }
    fi
    trap stop_progress EXIT
    make_venv
    mkdir -p "$state"
    for layer in "$@"; do install_layer "$layer"; done
    install_project
}

main "$@"
