#!/bin/sh
# Makes pdcluster's wheel in $WHEELS from the sources in $SOURCE, with locked build tools and nothing of theirs left over.
set -eu
SOURCE=${SOURCE:-/src}
WHEELS=${WHEELS:-/wheels}
PYTHON=${PYTHON:-python3}

tools=$(mktemp -d)
trap 'rm -rf "$tools"' EXIT
"$PYTHON" -m venv "$tools"
"$tools/bin/python" -m pip install -q --no-cache-dir --disable-pip-version-check --require-hashes \
    -r "$SOURCE/requirements/build.lock"
"$tools/bin/python" -m pip wheel -q --disable-pip-version-check --no-deps --no-build-isolation -w "$WHEELS" "$SOURCE"
