#!/usr/bin/env bash
# Runs the checks on a lent machine with a GPU, the most valuable first, from .device/ as `pack --engines` made it.
#
#     bash .device/lent.sh parts      first call: .device with connector.tar.xz, vllm.tar.xz and this file
#     bash .device/lent.sh engines    second call, on the same machine: .device with packages.tar.xz and this file
#
# $OUT: the folder that comes back. $LEFT_S: seconds that the whole may take. $THERE: what stays between the calls.
set -u -o pipefail
here=$(cd "$(dirname "$0")" && pwd)
there=${THERE:-/tmp/device-check}
root=$PWD
left_s=${LEFT_S:-300}
began=$SECONDS
mkdir -p "$there/connector" "$there/site"
if [ -f "$here/tree.tar.xz" ]; then # another tree than the checkout that travelled
    mkdir -p "$there/tree" && tar xf "$here/tree.tar.xz" -C "$there/tree"
fi
[ -d "$there/tree" ] && root=$there/tree
cd "$root" || exit 1

at_most() { # seconds, command: runs the command for that time, or for the time that is left if it is less
    local left=$((left_s - SECONDS + began))
    local limit=$(($1 < left ? $1 : left))
    shift
    [ "$limit" -gt 20 ] || { echo "left out, no time: $*" && return 1; }
    timeout --kill-after=5 "$limit" "$@" || echo "exit status $? of: $*"
}

parts() {
    tar xf "$here/connector.tar.xz" -C "$there/connector"
    tar xf "$here/vllm.tar.xz" -C "$there/site" & # for the second call
    local unpacking=$!
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv
    PYTHONPATH=$there/connector/python LD_LIBRARY_PATH=$there/connector/lib \
        at_most "$left_s" python3 -m tools.device_check --report "$OUT/report.md"
    wait $unpacking
}

engines() {
    tar xf "$here/packages.tar.xz" -C "$there/site"
    [ -d "$there/site/vllm" ] || { echo "vLLM is not here: this is another machine than the first call's" && exit 3; }
    local path=$there/site:$there/connector/python:$root
    for folder in protocol router connector operator kube cli; do path=$path:$root/$folder; done
    export PYTHONPATH=$path LD_LIBRARY_PATH=$there/connector/lib VLLM_USE_FLASHINFER_SAMPLER=0
    local logs=$there/logs
    at_most 270 python3 -m tools.device_check.engines --device cuda --kill --logs "$logs" graphs
    at_most 200 python3 -m tools.device_check.engines --device cuda --logs "$logs" v1-graphs
    at_most 130 python3 -m pdcluster_cli local --once --device cuda
    tar cJf "$OUT/logs.tar.xz" -C "$there" logs
}

export PYTHONUNBUFFERED=1
"$1" 2>&1 | tee "$OUT/$1.log"
