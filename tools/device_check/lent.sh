#!/usr/bin/env bash
# Runs the checks on a lent machine with a GPU from .device/ as `pack --engines` made it.
#
#     bash .device/lent.sh parts [CHECK...]     first call: .device with connector.tar.xz, vllm-0.26.tar.xz, this file
#     bash .device/lent.sh engines [STAGE...]   second call, on the same machine: .device with packages.tar.xz,
#                                               vllm-0.23.tar.xz, this file
#
# STAGE: answers adapters older local; all by default, in this order. CHECK: of `python -m tools.device_check`.
# $OUT: the folder that comes back. $LEFT_S: seconds that the whole may take. $THERE: what stays between the calls.
# $AT_ONCE: any text lets all stages run at the same time. Exit status: 0 if nothing has failed or was left out.
set -u -o pipefail
here=$(cd "$(dirname "$0")" && pwd)
there=${THERE:-/tmp/device-check}
root=$PWD
left_s=${LEFT_S:-300}
began=$SECONDS
mkdir -p "$there"/{connector,packages,vllm-0.26,vllm-0.23}
if [ -f "$here/tree.tar.xz" ]; then # another tree than the checkout that travelled
    mkdir -p "$there/tree" && tar xf "$here/tree.tar.xz" -C "$there/tree"
fi
[ -d "$there/tree" ] && root=$there/tree
cd "$root" || exit 1

at_most() { # seconds, command: runs the command for that time, or for the time that is left if it is less
    local left=$((left_s - SECONDS + began))
    local limit=$(($1 < left ? $1 : left))
    shift
    if [ "$limit" -le 20 ]; then
        echo "left out, no time: $*"
    elif timeout --kill-after=5 "$limit" "$@"; then
        return
    else
        echo "exit status $? of: $*"
    fi
    touch "$there/failed"
}

unpack() { # name: a part that came with this call
    [ ! -f "$here/$1.tar.xz" ] || tar xf "$here/$1.tar.xz" -C "$there/$1"
}

parts() {
    unpack connector
    unpack vllm-0.26 & # for the second call
    local unpacking=$!
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv
    PYTHONPATH=$there/connector/python LD_LIBRARY_PATH=$there/connector/lib \
        at_most "$left_s" python3 -m tools.device_check --report "$OUT/report.md" "$@"
    wait $unpacking || touch "$there/failed"
    [ ! -e "$there/failed" ]
}

compare() { # vLLM's version, seconds, options: engines of that version beside a single one
    local version=$1 limit=$2
    shift 2
    PYTHONPATH=$there/vllm-$version:$site \
        at_most "$limit" python3 -m tools.device_check.engines --device cuda "$@"
}

answers() { compare 0.26 270 --kill --logs "$there/logs/answers" graphs; }
adapters() { compare 0.26 200 --adapters --rounds 1 --longest 2049 --dtype float32 --logs "$there/logs/adapters" eager; }
older() { compare 0.23 200 --rounds 3 --longest 2049 --logs "$there/logs/older" sync-graphs; } # its decode engines need it
local_once() { PYTHONPATH=$there/vllm-0.26:$site at_most 130 python3 -m pdcluster_cli local --once --device cuda; }

engines() {
    unpack packages && unpack vllm-0.23
    [ -d "$there/vllm-0.26/vllm" ] || { echo "vLLM is not here: this is another machine than the first call's" && exit 3; }
    site=$there/packages:$there/connector/python:$root
    for folder in protocol router connector operator kube cli; do site=$site:$root/$folder; done
    export LD_LIBRARY_PATH=$there/connector/lib VLLM_USE_FLASHINFER_SAMPLER=0
    [ $# -gt 0 ] || set -- answers adapters older local
    for stage in "$@"; do
        [ "$stage" = local ] && stage=local_once
        { "$stage" || touch "$there/failed"; } &
        [ -n "${AT_ONCE:-}" ] || wait
    done
    wait
    mkdir -p "$there/logs" && tar cJf "$OUT/logs.tar.xz" -C "$there" logs
    [ ! -e "$there/failed" ]
}

rm -f "$there/failed" # whatever failed or was left out in this call
export PYTHONUNBUFFERED=1
"$@" 2>&1 | tee "$OUT/$1.log"
