"""Reads a kubeconfig with the official client (``kubernetes.aio.config``, 37), whose import takes 0.5 s and 26 MiB.

This file differs from the client in two things. An exec plugin is run by ``exec_plugin.py``: the client only logs a
failure and leaves a plugin that hangs behind. And it refuses users with an ``auth-provider``: without
authority data in the kubeconfig, the client renews their token from a server that it does not verify (37.0.2,
``aio/config/openid.py``).
"""

from __future__ import annotations

import asyncio
from base64 import b64encode
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from kubernetes.aio.client import Configuration
from kubernetes.aio.config import ConfigException
from kubernetes.aio.config.kube_config import KubeConfigLoader, KubeConfigMerger

from pdcluster_kube.access import checked_api_url, checked_header
from pdcluster_kube.exec_plugin import run_plugin
from pdcluster_kube.proxies import proxy_to
from pdcluster_protocol.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Loaded:
    """One context. ``header``: value of ``Authorization``, or empty."""

    url: str
    namespace: str
    header: str
    ca_file: Path | None
    cert_file: str | None
    key_file: str | None
    is_verified: bool
    server_name: str | None
    proxy: str | None


async def load(path: str, context: str | None, *, timeout_s: float) -> Loaded:
    """Read one context. ``path``: one path, or several with ``:`` between. ``timeout_s``: for an exec plugin.

    Raises:
        ConfigError: The kubeconfig cannot be used. The message names it and says why.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await _load(path, context)
    except TimeoutError as error:
        raise ConfigError(f"kubeconfig {path}: its exec plugin gave nothing within {timeout_s:g} s") from error
    except (yaml.YAMLError, UnicodeDecodeError, ConfigException, TypeError, AttributeError, KeyError) as error:
        why = " ".join(str(error).split()) or type(error).__name__
        cure = "mend it, or name another with --kubeconfig"
        raise ConfigError(f"kubeconfig {path}: it cannot be used ({why}): {cure}") from error
    except (OSError, ValueError) as error:  # ``ValueError``: words of ours.
        raise ConfigError(f"kubeconfig {path}: {error}") from error


async def _load(path: str, context: str | None) -> Loaded:
    configuration = Configuration()
    config = KubeConfigMerger(path).config
    _require_context(config.value if config else None, context)
    loader = _Loader(config, active_context=context, config_base_path=None)
    await loader.load_and_set(configuration)
    url = checked_api_url(configuration.host)
    return Loaded(
        url=url,
        namespace=loader.current_context["context"].get("namespace") or "default",
        header=checked_header(configuration.api_key.get("BearerToken", "")),
        ca_file=Path(configuration.ssl_ca_cert) if configuration.ssl_ca_cert else None,
        cert_file=configuration.cert_file,
        key_file=configuration.key_file,
        is_verified=configuration.verify_ssl,
        server_name=configuration.tls_server_name or None,
        proxy=proxy_to(url, configuration.proxy),
    )


def _require_context(kubeconfig: Any, context: str | None) -> None:
    """The client's own words would name neither the contexts that there are nor the flag that chooses one."""
    if not isinstance(kubeconfig, dict) or not (contexts := kubeconfig.get("contexts")):
        raise ValueError("it has no contexts: name another with --kubeconfig")
    wanted, names = context or kubeconfig.get("current-context"), [one["name"] for one in contexts]
    if wanted not in names:
        said = f"it has no context {wanted}" if wanted else "it has no current context"
        raise ValueError(f"{said}: choose {' or '.join(names)} with --context")


class _Loader(KubeConfigLoader):  # type: ignore[misc]  # the client has no types
    """The client's loader, with our own treatment of exec plugins and auth-providers."""

    _user: Any

    async def load_and_set(self, client_configuration: Any) -> None:
        if self._user is not None and "auth-provider" in self._user:
            raise ValueError("its user logs in by an auth-provider: use an exec plugin, such as kubectl oidc-login")
        await super().load_and_set(client_configuration)

    async def load_from_exec_plugin(self) -> bool:
        """Run the exec plugin, and put its token or certificate where the client looks for it. Returns True."""
        plugin = self._user["exec"].value
        status = await run_plugin(plugin)
        if token := status.get("token"):
            self.token = f"Bearer {token}"
        elif "clientCertificateData" in status and "clientKeyData" in status:
            names = {"client-certificate-data": "clientCertificateData", "client-key-data": "clientKeyData"}
            self._user.value.update({name: _base64(status[said]) for name, said in names.items()})
        else:
            raise ValueError(f"its exec plugin {plugin['command']} gave neither a token nor a certificate with its key")
        return True


def _base64(text: str) -> str:
    return b64encode(text.encode()).decode()
