#!/bin/sh
# Installs the Debian packages of a node, unless KUBECONFIG names a cluster with nodes, and a browser.
set -eu

missing=""
need() { command -v "$1" >/dev/null || missing="$missing $2"; }
need chromium chromium
if [ -z "${KUBECONFIG:-}" ]; then
    need containerd containerd
    need runc runc
    need iptables iptables
    need conntrack conntrack
    need socat socat
    need debootstrap debootstrap
    need ip iproute2
    need curl curl
    need gcc gcc
    [ -x /usr/lib/cni/bridge ] || missing="$missing containernetworking-plugins"
    # pip in the root folder for pods trusts the authorities that this machine trusts.
    [ -f /etc/ssl/certs/ca-certificates.crt ] || missing="$missing ca-certificates"
fi
[ -n "$missing" ] || exit 0

if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "pdcluster: the stories need root to install these packages:$missing; with a cluster of yours, KUBECONFIG=... make e2e, only chromium" >&2
    exit 1
fi
echo "pdcluster: installing$missing"
# shellcheck disable=SC2086  # a list of words
if ! { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null; }; then
    echo "pdcluster: apt-get could not install them; type: sudo apt-get install -y$missing" >&2
    exit 1
fi
