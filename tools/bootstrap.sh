#!/bin/sh
# Everything pdcluster needs on a bare Debian or Ubuntu with Python >= 3.11: system libraries, .venv, locked packages.
# Run again, it changes nothing and takes a moment. PYTHON=python3.12 chooses another interpreter.
set -eu
cd "$(dirname "$0")/.."
VENV=.venv
STAMP=$VENV/installed

fail() { printf '%s\n' "pdcluster: $*" >&2; exit 1; }

# A venv remembers its interpreter; PYTHON counts when it is made.
wanted=$(cat requirements/bootstrap.lock requirements/dev.lock pyproject.toml tools/bootstrap.sh | sha256sum | cut -c1-64)
if [ -f "$STAMP" ] && [ "$(cat "$STAMP")" = "$wanted" ] && [ -x $VENV/bin/python ]; then exit 0; fi

find_python() {
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
}

python=$(find_python)
[ -n "$python" ] || fail "no Python 3.11, 3.12 or 3.13 found (${PYTHON:-python3}): sudo apt-get install -y python3, or set PYTHON=/path/to/python3.12"
[ "$(uname -m)" = x86_64 ] || fail "this machine is $(uname -m): the locked CPU engine is built for x86-64 only"

missing_packages() {
    "$python" - <<'PROGRAM'
import ctypes, importlib.util, pathlib, shutil, sys, sysconfig

LIBRARIES = {"libibverbs.so.1": "libibverbs1", "librdmacm.so.1": "librdmacm1", "libnuma.so.1": "libnuma1",
             "libcurl.so.4": "libcurl4"}
missing = []
for library, package in LIBRARIES.items():
    try:
        ctypes.CDLL(library)
    except OSError:
        missing.append(package)
if importlib.util.find_spec("ensurepip") is None:
    missing.append(f"python{sys.version_info[0]}.{sys.version_info[1]}-venv")
# vLLM compiles kernels with torch.compile unless it is started with --enforce-eager.
if not shutil.which("g++"):
    missing.append("g++")
if not (pathlib.Path(sysconfig.get_path("include")) / "Python.h").exists():
    missing.append(f"libpython{sys.version_info[0]}.{sys.version_info[1]}-dev")
# The slow links of benchmarks and their tests.
if not shutil.which("ip"):
    missing.append("iproute2")
print(" ".join(missing))
PROGRAM
}

packages=$(missing_packages)
if [ -n "$packages" ]; then
    command -v apt-get >/dev/null || fail "these Debian packages, or what your system calls them, are missing: $packages"
    if [ "$(id -u)" = 0 ]; then as_root=""
    elif sudo -n true 2>/dev/null; then as_root="sudo -n"
    else fail "system packages are missing; type: sudo apt-get install -y $packages"
    fi
    echo "pdcluster: installing $packages"
    log=$(mktemp)
    # shellcheck disable=SC2086  # a list of words
    if ! { $as_root apt-get update -qq && DEBIAN_FRONTEND=noninteractive $as_root apt-get install -y -qq --no-install-recommends $packages; } >"$log" 2>&1; then
        tail -n 5 "$log" >&2
        fail "apt-get could not install them; type: sudo apt-get install -y $packages"
    fi
    rm -f "$log"
fi

echo "pdcluster: installing Python packages into $VENV (about 6 GB, once)"
if [ ! -x $VENV/bin/python ]; then
    rm -rf $VENV
    "$python" -m venv $VENV || fail "no virtual environment could be made in $VENV with $python"
fi
$VENV/bin/python -m pip --version >/dev/null 2>&1 || $VENV/bin/python -m ensurepip >/dev/null
$VENV/bin/python -m pip install -q --disable-pip-version-check --require-hashes -r requirements/bootstrap.lock ||
    fail "uv could not be installed: is the package index reachable (pip config list)?"
uv="$VENV/bin/uv pip install -q --python $VENV/bin/python --no-deps"
$uv --require-hashes -r requirements/dev.lock || fail "the locked packages could not be installed: see above"
$uv --no-build-isolation -e . || fail "pdcluster itself could not be installed into $VENV"
printf '%s' "$wanted" >"$STAMP"
