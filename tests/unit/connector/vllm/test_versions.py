"""Every version of vLLM is known, or refused in one line with the cure."""

from __future__ import annotations

import pytest
import vllm

from pdcluster_connector.vllm.versions import RELEASE, VllmRelease, release_of
from pdcluster_protocol.errors import ConfigError


@pytest.mark.parametrize(
    ("version", "defers_frees", "defers_window_frees", "names_layouts", "by_request"),
    [
        ("0.23.0", False, False, False, False),
        ("0.23.0.post1", False, False, False, False),
        ("0.24.0", True, False, False, False),
        ("0.25.1", True, False, False, False),
        ("0.26.0", True, True, False, False),
        ("0.28.1rc2", True, True, False, False),
        ("0.29.0", True, True, True, False),
        ("0.30.0", True, True, True, True),
        ("0.32.1.dev3+gabcdef", True, True, True, True),
        ("0.33.0", True, True, True, True),
    ],
)
def test_a_release_is_known_by_its_minor_version(
    version: str, defers_frees: bool, defers_window_frees: bool, names_layouts: bool, by_request: bool
) -> None:
    release = VllmRelease(version, defers_frees, defers_window_frees, names_layouts, by_request, by_request)
    assert release_of(version) == release


@pytest.mark.parametrize("version", ["0.22.1", "0.34.0", "1.0.0", "dev", ""])
def test_any_other_is_refused_with_those_that_are_supported(version: str) -> None:
    with pytest.raises(ConfigError) as refused:
        release_of(version)
    assert str(refused.value) == (
        f"this is vLLM {version}: PDClusterConnector 0.1 supports vLLM 0.23 to 0.33: install one of these on prefill "
        "and on decode"
    )


def test_the_release_is_that_of_the_vllm_that_is_installed() -> None:
    assert release_of(vllm.__version__) == RELEASE
