#!/bin/sh
# Adds the connector to an image that has vLLM for its device. Nothing that is there is changed, but for a Mooncake that
# is too old or cannot be loaded.
# TRANSFER: Mooncake's wheel for this device with its version, such as mooncake-transfer-engine-cuda13==0.3.14; a Mooncake
# of the image that is new enough is kept, and then nothing has to be given.
set -eu
WHEELS=${WHEELS:-/wheels}
TRANSFER=${TRANSFER:-}
PYTHON=${PYTHON:-python3}
PASSWD=${PASSWD:-/etc/passwd}
export TRANSFER

fail() { printf '%s\n' "pdcluster: $*" >&2; exit 1; }

# Without bytecode: what is compiled by time here would be left as it is at the end, where it is compiled by hash.
checks() { PYTHONDONTWRITEBYTECODE=1 "$PYTHON" "$WHEELS/engine_checks.py" "$@"; }

pip() { "$PYTHON" -m pip "$@" -q --disable-pip-version-check; }

# Folders of modules of this Python, not those of one that it was made from; and vLLM's own, which images of vLLM-Ascend
# have outside of them (an editable install).
module_folders() {
    "$PYTHON" - <<'PROGRAM'
import importlib.util, os, site, sys, sysconfig

folders = {*site.getsitepackages(), *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))}
folders = {folder for folder in folders if os.path.isdir(folder) and folder.startswith(sys.prefix + os.sep)}
for name in ("vllm", "vllm_ascend"):
    spec = importlib.util.find_spec(name)
    folders |= {os.path.dirname(spec.origin)} if spec and spec.origin else set()
print(*sorted(folders))
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

checks base
wheel=
plan=$(checks mooncake)
case $plan in
keep) echo "pdcluster: this image's own Mooncake is kept" ;;
install) wheel=$TRANSFER ;;
replace*)
    wheel=$TRANSFER
    # shellcheck disable=SC2086  # a list of names
    pip uninstall --yes ${plan#replace }
    ;;
esac
# shellcheck disable=SC2086  # one word, or none
pip install --no-cache-dir --no-deps "$WHEELS"/pdcluster-*.whl $wheel

packages=$(checks packages)
if [ -n "$packages" ]; then
    # shellcheck disable=SC2086  # a list of words
    command -v apt-get >/dev/null || fail "install these, or what this system calls them, in an image of your own first:" $packages
    apt-get update -qq
    # shellcheck disable=SC2086  # a list of words
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $packages
    rm -rf /var/lib/apt/lists/*
fi
# As an engine does: a build that ends well and an engine that cannot start would be the worst of both.
checks load
PYTHONDONTWRITEBYTECODE=1 pdcluster --help >/dev/null

# Engines run as this user, whom no image knows: HCCL and getpwuid() fail for a number without a name.
if ! grep -q '^[^:]*:[^:]*:10001:' "$PASSWD"; then
    echo 'pdcluster:x:10001:10001:pdcluster engine:/cache:/usr/sbin/nologin' >>"$PASSWD"
fi

# The root file system is read-only where this runs: bytecode that is not there now is compiled at every start of an
# engine, and by every readiness probe. What is there and valid stays. By the hash of the source: builders change times,
# and users mount a module of their own over one. Some packages carry templates that are no Python; they do not count.
# shellcheck disable=SC2046  # a list of folders
"$PYTHON" -m compileall -qq -j 0 --invalidation-mode checked-hash $(module_folders) || :
has_bytecode vllm pdcluster_connector pdcluster_cli || fail "modules could not be compiled: is there room in this image?"
