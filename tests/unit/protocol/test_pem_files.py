"""What all parts do alike with PEM files."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from pathlib import Path

import pytest

from pdcluster_protocol.pem_files import no_password, state_of, words_of


def error_of(load: Callable[[ssl.SSLContext], object]) -> OSError:
    with pytest.raises(OSError) as caught:
        load(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
    return caught.value


def test_a_file_behind_a_link_that_is_replaced_has_another_state(tmp_path: Path) -> None:
    for name in ("old", "new"):
        (tmp_path / name).write_text("the same")
    link = tmp_path / "tls.crt"
    link.symlink_to("old")
    before = state_of(link)
    assert before == state_of(str(link))
    link.unlink()
    assert state_of(link) is None
    link.symlink_to("new")
    assert state_of(link) not in (before, None)


def test_the_reason_is_openssls_or_the_systems_in_plain_words(tmp_path: Path) -> None:
    gone = error_of(lambda context: context.load_verify_locations(tmp_path / "nowhere"))
    assert words_of(gone) == "No such file or directory"
    error = ssl.SSLError()
    error.reason = "KEY_VALUES_MISMATCH"
    assert words_of(error) == "key values mismatch"


def test_where_openssl_gives_no_reason_the_caller_says_what_stands_for_it(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no PEM")
    error = error_of(lambda context: context.load_cert_chain(tmp_path / "text", password=no_password))
    assert words_of(error) == "OpenSSL cannot read it"
    assert words_of(error, "nonsense") == "nonsense"
