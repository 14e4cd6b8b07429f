#!/bin/sh
# Installs router and operator in $PREFIX: the locked packages and the wheel of $WHEELS, no more.
set -eu
SOURCE=${SOURCE:-/src}
WHEELS=${WHEELS:-/wheels}
PREFIX=${PREFIX:-/opt/pdcluster}
PYTHON=${PYTHON:-python3}

"$PYTHON" -m venv "$PREFIX"
pip() { "$PREFIX/bin/python" -m pip "$@" -q --disable-pip-version-check; }
pip install --no-cache-dir --require-hashes -r "$SOURCE/requirements/control.lock"
pip install --no-cache-dir --no-deps "$WHEELS"/pdcluster-*.whl
# The root file system is read-only where this runs: bytecode that is not there now is compiled at every start.
"$PREFIX/bin/python" -m compileall -q -j 0 "$PREFIX"
# Nobody installs anything there later.
pip uninstall --yes pip
"$PREFIX/bin/pdcluster" router --help >/dev/null
