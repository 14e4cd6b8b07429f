"""``helm test``: the API server knows our kinds, and the operator says that it is ready. Needs nothing but Python.

Waits for the operator up to ``DEADLINE_S``: right after an installation its first lists may still be under way.
"""

from __future__ import annotations

import json
import os
import ssl
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

ACCOUNT = Path(os.environ.get("ACCOUNT_FOLDER", "/var/run/secrets/kubernetes.io/serviceaccount"))
CALL_S = 5.0
DEADLINE_S = float(os.environ.get("DEADLINE_S", "60"))


def main() -> int:
    """0 if API server and operator answer as they should; else 1, and the last line names the fault and its cure."""
    try:
        check_kinds(os.environ["API_URL"], os.environ["NAMESPACE"])
        wait_until_ready(os.environ["OPERATOR_URL"])
    except CheckError as error:
        print(f"pdcluster: {error}", file=sys.stderr)
        return 1
    print("pdcluster: the API server knows PDCluster and PDRoleScaler, and the operator is ready")
    return 0


class CheckError(Exception):
    """What is wrong, and what helps."""


def check_kinds(api_url: str, namespace: str) -> None:
    """Raises: CheckError: The API server does not list our objects."""
    for plural in ("pdclusters", "pdrolescalers"):
        url = f"{api_url}/apis/pdcluster.dev/v1alpha1/namespaces/{namespace}/{plural}?limit=1"
        try:
            kind = json.loads(_read(url, _token())).get("kind")
        except (OSError, ValueError) as error:
            raise CheckError(f"no list of {plural} ({error}){_cure_of(error)}") from error
        print(f"{plural}: the API server answers with a {kind}")


def _cure_of(error: Exception) -> str:
    """An API server answers 404 for a kind that it does not know. Any other error has another cause."""
    is_unknown = isinstance(error, urllib.error.HTTPError) and error.code == 404
    return ": install the CRDs, with crds.enabled=true or crds/" if is_unknown else ""


def wait_until_ready(operator_url: str) -> None:
    """Raises: CheckError: The operator did not become ready in time."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            _read(f"{operator_url}/readyz", "")
        except OSError as error:
            if time.monotonic() >= deadline:
                raise CheckError(f"the operator is not ready ({error}): read its log with kubectl logs") from error
            time.sleep(1)
        else:
            print("operator: ready")
            return


def _token() -> str:
    file = ACCOUNT / "token"
    return file.read_text().strip() if file.exists() else ""


def _read(url: str, token: str) -> bytes:
    """The body of a 200, straight from there: a proxy does not know the cluster's names.

    Raises: OSError: There is none (urllib's errors are OSErrors).
    """
    authorities = ACCOUNT / "ca.crt"
    trust = ssl.create_default_context(cafile=str(authorities) if authorities.exists() else None)
    # Since Python 3.13 the default demands key identifiers, which the authorities of older clusters do not have.
    trust.verify_flags &= ~ssl.VERIFY_X509_STRICT
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=trust))
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})  # noqa: S310
    with opener.open(request, timeout=CALL_S) as answer:
        body: bytes = answer.read()
    return body


if __name__ == "__main__":
    sys.exit(main())
