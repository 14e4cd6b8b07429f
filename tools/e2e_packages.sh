#!/bin/sh
# Installs the Debian packages of a node, and a browser. Does nothing if they are there, or if KUBECONFIG names a cluster.
set -eu
[ -z "${KUBECONFIG:-}" ] || exit 0

missing=""
need() { command -v "$1" >/dev/null || missing="$missing $2"; }
need containerd containerd
need runc runc
need iptables iptables
need conntrack conntrack
need socat socat
need debootstrap debootstrap
need ip iproute2
need curl curl
need gcc gcc
need chromium chromium
[ -x /usr/lib/cni/bridge ] || missing="$missing containernetworking-plugins"
# pip in the root folder for pods trusts the authorities that this machine trusts.
[ -f /etc/ssl/certs/ca-certificates.crt ] || missing="$missing ca-certificates"
[ -n "$missing" ] || exit 0

if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "pdcluster: a node of our own needs root and these packages of Debian:$missing; or give a cluster: KUBECONFIG=... make e2e" >&2
    exit 1
fi
echo "pdcluster: installing$missing"
# shellcheck disable=SC2086  # a list of words
if ! { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null; }; then
    echo "pdcluster: apt-get could not install them; type: sudo apt-get install -y$missing" >&2
    exit 1
fi
