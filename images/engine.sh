#!/bin/sh
# Adds the connector to an image that has vLLM for its device, and changes nothing that is there: no package is upgraded.
# TRANSFER: Mooncake's wheel for this device with its version, such as mooncake-transfer-engine==0.3.13.post1; empty
# where the image brings Mooncake (vLLM-Ascend's does).
set -eu
WHEELS=${WHEELS:-/wheels}
TRANSFER=${TRANSFER:-}
PYTHON=${PYTHON:-python3}

fail() { printf '%s\n' "pdcluster: $*" >&2; exit 1; }

has_modules() {
    "$PYTHON" - "$@" <<'PROGRAM'
import importlib.util, sys

missing = [name for name in sys.argv[1:] if importlib.util.find_spec(name) is None]
if missing:
    sys.exit("missing: " + ", ".join(missing))
PROGRAM
}

# Debian packages of the libraries that Mooncake loads and that are not here.
missing_packages() {
    "$PYTHON" - <<'PROGRAM'
import ctypes

LIBRARIES = {"libibverbs.so.1": "libibverbs1", "librdmacm.so.1": "librdmacm1", "libnuma.so.1": "libnuma1",
             "libcurl.so.4": "libcurl4"}
for library, package in LIBRARIES.items():
    try:
        ctypes.CDLL(library)
    except OSError:
        print(package)
PROGRAM
}

# Folders of modules of this Python, not those of one that it was made from.
module_folders() {
    "$PYTHON" - <<'PROGRAM'
import os, site, sys, sysconfig

folders = {*site.getsitepackages(), *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))}
print(*sorted(folder for folder in folders if os.path.isdir(folder) and folder.startswith(sys.prefix + os.sep)))
PROGRAM
}

has_bytecode() {
    "$PYTHON" - "$@" <<'PROGRAM'
import importlib.util, os, sys

origins = {name: importlib.util.find_spec(name).origin for name in sys.argv[1:]}
missing = [name for name, origin in origins.items() if not os.path.exists(importlib.util.cache_from_source(origin))]
if missing:
    sys.exit("no bytecode: " + ", ".join(missing))
PROGRAM
}

# vLLM needs all that the connector needs beside it.
has_modules vllm msgspec aiohttp numpy zmq ||
    fail "BASE is no image of vLLM for this python3 ($PYTHON): give one, such as --build-arg BASE=vllm/vllm-openai:TAG"

packages=$(missing_packages)
if [ -n "$packages" ]; then
    command -v apt-get >/dev/null || fail "install these, or what this system calls them, in an image of your own first:" $packages
    apt-get update -qq
    # shellcheck disable=SC2086  # a list of words
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $packages
    rm -rf /var/lib/apt/lists/*
fi

# shellcheck disable=SC2086  # one word, or none
"$PYTHON" -m pip install -q --no-cache-dir --disable-pip-version-check --no-deps "$WHEELS"/pdcluster-*.whl $TRANSFER
has_modules mooncake || fail "there is no Mooncake in this image: name its wheel with --build-arg TRANSFER=..."
pdcluster --help >/dev/null
# The root file system is read-only where this runs: bytecode that is not there now is compiled at every start of an
# engine, and by every readiness probe. What is there and valid stays. By the hash of the source: builders change times,
# and users mount a module of their own over one. Some packages carry templates that are no Python; they do not count.
# shellcheck disable=SC2046  # a list of folders
"$PYTHON" -m compileall -qq -j 0 --invalidation-mode checked-hash $(module_folders) || :
has_bytecode vllm pdcluster_connector pdcluster_cli || fail "modules could not be compiled: is there room in this image?"
