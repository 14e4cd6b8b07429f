"""Chooses the HTTP proxy to an API server, from a kubeconfig's ``proxy-url`` or from the environment, as kubectl does.

An API server on this machine is asked directly, unless the kubeconfig itself names a proxy. An unencrypted request
carries our token, so no proxy ever gets one.

Source of truth: Go's ``golang.org/x/net/http/httpproxy``.
"""

from __future__ import annotations

from ipaddress import ip_address, ip_network
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass


def proxy_to(url: str, named: str | None) -> str | None:
    """URL of the proxy to the API server at ``url``; None: no proxy. ``named``: the kubeconfig's ``proxy-url``.

    Reads ``HTTPS_PROXY`` and ``NO_PROXY``, whose entries may be names, addresses and networks such as ``10.0.0.0/8``.

    Raises:
        ValueError: The proxy is no HTTP proxy, or would see the token.
    """
    parts = urlsplit(url)
    if named and parts.scheme != "https":
        raise ValueError(f"its proxy-url would see the token that goes to {url}: use https, or no proxy")
    found = named or (_of_environment(parts.hostname or "") if parts.scheme == "https" else None)
    return _checked(found) if found else None


def _of_environment(host: str) -> str | None:
    proxies = getproxies()
    if _is_loopback(host) or proxy_bypass(host) or _is_in_networks(host, proxies.get("no", "")):
        return None
    return proxies.get("https")


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _is_in_networks(host: str, no_proxy: str) -> bool:
    """Whether ``host`` is an address in one of the networks of ``NO_PROXY``."""
    return any(_is_in(host, entry.strip()) for entry in no_proxy.split(",") if "/" in entry)


def _is_in(host: str, network: str) -> bool:
    try:
        return ip_address(host) in ip_network(network, strict=False)
    except ValueError:
        return False


def _checked(proxy: str) -> str:
    """The proxy with its scheme. The message leaves the URL out: it may hold a password."""
    whole = proxy if "://" in proxy else f"http://{proxy}"
    parts = urlsplit(whole)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(
            f"its proxy of scheme {parts.scheme} cannot be used: name one like http://HOST:PORT in proxy-url or "
            "HTTPS_PROXY"
        )
    return whole
