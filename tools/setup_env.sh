#!/usr/bin/env bash
# Creates .venv with the pins of requirements/lock.txt and this project, editable, and the additional
# packages that tests import (requirements/side.txt).
#
# Without changes a call takes one start of Python and no network. An interrupted call is resumed: the
# stamp is written last, and a broken .venv is created again. pip's configuration is left to the
# machine.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=.venv
stamp=$venv/megatron-muon.stamp
lock=requirements/lock.txt
started=$SECONDS

say() { printf '[setup %3ds] %s\n' "$((SECONDS - started))" "$*"; }

# Succeeds if the interpreter can create the environment (venv and ensurepip are separate packages on
# Debian) and, with a second argument, is Python 3.<that>.
fits() {
    "$1" -c 'import sys, ssl, venv, ensurepip
minor = sys.version_info[1]
sys.exit(sys.version_info[0] != 3 or str(minor) not in sys.argv[1:])' \
        ${2:-12 13} >/dev/null 2>&1
}

# Prints the possible places of Python 3.<argument>, best first; `fits` filters them.
candidates() {
    local minor=$1 pyenv_root="${PYENV_ROOT:-$HOME/.pyenv}"
    if command -v pyenv >/dev/null 2>&1; then pyenv_root=$(pyenv root); fi
    echo "python3.$minor"
    echo python3
    ls -d "$pyenv_root/versions/3.$minor"*/bin/python 2>/dev/null | sort -rV || true
    if command -v uv >/dev/null 2>&1; then
        uv python find --no-project "3.$minor" 2>/dev/null || true
    fi
    ls -d /usr/local/bin/"python3.$minor" /opt/*/bin/"python3.$minor" \
        "$HOME"/*conda*/bin/"python3.$minor" "$HOME"/*conda*/envs/*/bin/"python3.$minor" \
        2>/dev/null || true
}

find_python() {
    local python minor
    if [ -n "${PYTHON:-}" ]; then
        if fits "$PYTHON"; then
            echo "$PYTHON"
            return
        fi
        say "PYTHON=$PYTHON is not Python 3.12 or 3.13 with venv and ensurepip; searching others" >&2
    fi
    for minor in 12 13; do
        while IFS= read -r python; do
            if fits "$python" "$minor"; then
                echo "$python"
                return
            fi
        done < <(candidates "$minor")
    done
    cat >&2 <<'MISSING'
No Python 3.12 (or 3.13) with the modules venv, ensurepip and ssl was found; install one (for example `apt install python3.12 python3.12-venv`, `pyenv install 3.12` or `uv python install 3.12`), or name one with `PYTHON=/path/to/python3.12 make setup`.
MISSING
    return 1
}

# Succeeds if the interpreter and its pip work.
healthy() { "$venv/bin/python" -m pip --version >/dev/null 2>&1; }

# Prints the content of the stamp: pins, packaging, interpreter, and path (.venv cannot be moved).
fingerprint() {
    "$venv/bin/python" - "$lock" setup.py <<'PYTHON_CODE'
import hashlib, pathlib, sys
digest = hashlib.sha256(repr((sys.version, sys.prefix)).encode())
for name in sys.argv[1:]:
    digest.update(pathlib.Path(name).read_bytes())
print(digest.hexdigest())
PYTHON_CODE
}

# Prints the pins that .venv does not satisfy. Exits 2 if a package is partially installed: pip writes
# RECORD last, and cannot repair a package without one.
unmet_pins() {
    "$venv/bin/python" - "$lock" <<'PYTHON_CODE'
import importlib.metadata as metadata, pathlib, sys, sysconfig
site_packages = pathlib.Path(sysconfig.get_path("purelib"))
if not all((folder / "RECORD").exists() for folder in site_packages.glob("*.dist-info")):
    sys.exit(2)
for line in pathlib.Path(sys.argv[1]).read_text().splitlines():
    pin = line.partition("#")[0].strip()
    if not pin:
        continue
    name, _, version = pin.partition("==")
    try:
        installed = metadata.version(name)
    except metadata.PackageNotFoundError:
        installed = ""
    if installed.partition("+")[0] != version:
        print(pin)
PYTHON_CODE
}

pip_install() { "$venv/bin/python" -m pip install --quiet --constraint "$lock" "$@"; }

make_venv() {
    local python
    python=$(find_python)
    say "creating $venv with $("$python" -c 'import sys; print(sys.executable, sys.version.split()[0])')"
    rm -rf "$venv"
    "$python" -m venv "$venv"
}

# Installs the folders of requirements/side.txt: under another name, then renamed.
side_folders() {
    local folder pins target
    while read -r folder pins; do
        target=build/side/$folder
        case $folder in '' | '#'*) continue ;; esac
        if [ "$(cat "$target/pins" 2>/dev/null)" = "$pins" ]; then continue; fi
        say "installing $pins into $target"
        rm -rf "$target" "$target.part"
        # Word splitting is intended: one argument per pin.
        # shellcheck disable=SC2086
        "$venv/bin/python" -m pip install --quiet --no-deps --target "$target.part" $pins
        echo "$pins" >"$target.part/pins"
        mv "$target.part" "$target"
    done <requirements/side.txt
}

if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$(fingerprint 2>/dev/null || true)" ]; then
    side_folders
    exit 0
fi

if ! fits "$venv/bin/python" || ! healthy; then
    make_venv
fi
rm -f "$stamp"

code=0
pins=$(unmet_pins) || code=$?
if [ "$code" -ne 0 ]; then
    say "a package in $venv is partially installed; creating $venv again"
    make_venv
    pins=$(unmet_pins)
fi

torch_pin=$(grep '^torch==' <<<"$pins" || true)
if [ -n "$torch_pin" ]; then
    # First and alone, so that no other package's looser requirement selects another build.
    say "installing $torch_pin with its CUDA libraries (several GB, a few minutes)"
    pip_install "$torch_pin"
fi

other_pins=$(grep -v '^torch==' <<<"$pins" || true)
if [ -n "$other_pins" ]; then
    say "installing $(wc -l <<<"$other_pins" | tr -d ' ') pinned packages"
    # Word splitting is intended: one argument per pin.
    # shellcheck disable=SC2086
    pip_install $other_pins
fi

say "installing megatron-muon, editable"
"$venv/bin/python" -m pip install --quiet --no-deps --no-build-isolation --no-index \
    --config-settings editable_mode=compat --editable .
"$venv/bin/python" -m pip check >/dev/null || {
    say "the packages in $venv conflict:" >&2
    "$venv/bin/python" -m pip check >&2
}

side_folders
fingerprint >"$stamp"
say "ready: $venv ($("$venv/bin/python" -c 'import sys; print(sys.version.split()[0])'))"
