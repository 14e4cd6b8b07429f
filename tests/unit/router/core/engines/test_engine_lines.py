"""The lines that name engines, and what is said of those that do not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.labels import Role
from pdcluster_router.core.engines.engine_lines import engines_in, last_prefills
from pdcluster_router.core.engines.membership import EngineState, Member
from pdcluster_router.settings.forms import checked_url

BOTH = "prefill http://p:1\ndecode http://d:2\n"
PAIR = "name a prefill and a decode engine of one revision"
FORM = "write prefill or decode, a URL like http://HOST:PORT, and revision=NAME where there are several"


def test_each_line_names_an_engine() -> None:
    text = """
    # The pool of the third floor.
    prefill http://10.0.0.5:8100/
    prefill\thttps://[::1]:8101   revision=a-1.b_2   # new
    # decode http://gone:2

    decode http://d:2"""
    assert engines_in(text, checked_url) == (
        Member("http://10.0.0.5:8100", Role.PREFILL),
        Member("https://[::1]:8101", Role.PREFILL, "a-1.b_2"),
        Member("http://d:2", Role.DECODE),
    )


@pytest.mark.parametrize(
    "line",
    [
        "both http://p:3",
        "prefill",
        "http://p:3",
        "prefill http://p:3 revis",
        "prefill http://p:3 revision=",
        "prefill http://p:3 revision=a b",
        "prefill http://p:3 revision=a revision=b",
        "\x00" * 200,
    ],
)
def test_a_line_of_another_form_is_told_by_its_number_for_it_may_be_a_secret(line: str) -> None:
    with pytest.raises(ConfigError) as told:
        engines_in(f"{BOTH}{line}", checked_url)
    assert str(told.value) == f"line 3 names no engine: {FORM}"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", f"no revision has engines of both roles: prefill has none and decode has none: {PAIR}"),
        (
            "# prefill http://p:1",
            f"no revision has engines of both roles: prefill has none and decode has none: {PAIR}",
        ),
        ("decode http://d:2\n", f"no revision has engines of both roles: prefill has none and decode has -: {PAIR}"),
        (
            "prefill http://p:1\ndecode http://d:2 revision=b\ndecode http://d:3 revision=a",
            f"no revision has engines of both roles: prefill has - and decode has a, b: {PAIR}",
        ),
        ("\nprefill p:1", "line 2: 'p:1' is not a URL like http://HOST:PORT"),
        ("prefill http://p/v1", "line 1: 'http://p/v1' has more than a host and a port: give http://HOST:PORT only"),
        ("prefill http://p:99999", "line 1: Port out of range 0-65535"),
        (f"{BOTH}decode http://d:2/", "line 3: http://d:2 is named in line 2 already: leave one of them out"),
        (f"{BOTH}decode http://d:2 revision=b", "line 3: http://d:2 is named in line 2 already: leave one of them out"),
    ],
)
def test_a_file_that_names_no_pool_is_refused_with_the_cure(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as told:
        engines_in(text, checked_url)
    assert str(told.value) == said


def test_a_url_with_a_password_is_not_told() -> None:
    with pytest.raises(ConfigError) as told:
        engines_in("prefill http://me:secret@p:1", checked_url)
    assert str(told.value) == "line 1: the URL has a user or a password: give http://HOST:PORT only"


def test_of_many_revisions_a_few_are_told() -> None:
    text = "".join(f"prefill http://p:{port} revision=r{port}\n" for port in range(1, 999))
    with pytest.raises(ConfigError, match=r"prefill has r1, r10, r100 and others and decode has none: "):
        engines_in(text, checked_url)


WORDS = st.sampled_from(["prefill", "decode", "http://p:1", "https://d:2", "http://[::1", "revision=a", "#", " ", "\n"])


@given(st.one_of(st.text(), st.lists(WORDS).map(" ".join)))
def test_any_text_names_a_pair_or_is_refused_in_one_line(text: str) -> None:
    members: tuple[Member, ...] = ()
    refusal = ""
    try:
        members = engines_in(text, checked_url)
    except ConfigError as error:
        refusal = str(error)
    assert "\n" not in refusal
    pairs = [{member.revision for member in members if member.role is role} for role in Role]
    assert bool(refusal) == (not set.intersection(*pairs))
    assert len({(member.role, member.url) for member in members}) == len(members)


def prefill(port: int, revision: str = "a") -> Member:
    return Member(f"http://p:{port}", Role.PREFILL, revision)


DECODE = Member("http://d:1", Role.DECODE, "a")


@pytest.mark.parametrize(
    ("before", "now", "finishing"),
    {
        "rolled": ([prefill(1), DECODE], [prefill(2, "b")], [prefill(1)]),
        "replaced": ([prefill(1), DECODE], [prefill(2), DECODE], [prefill(1)]),
        "fewer": ([prefill(1), prefill(2), DECODE], [prefill(2), DECODE], []),
        "started anew as another revision": ([prefill(1), DECODE], [prefill(1, "b"), DECODE], []),
        "unchanged": ([prefill(1), DECODE], [prefill(1), DECODE], []),
    }.values(),
)
def test_prefill_engines_of_a_revision_that_keeps_none_finish(
    before: list[Member], now: list[Member], finishing: list[Member]
) -> None:
    left = last_prefills(before, now)
    assert [replace(member, is_terminating=False) for member in left] == finishing
    assert all(member.state is EngineState.FINISHING for member in left)
    assert last_prefills(left, now) == left
    assert last_prefills(left, before) == ()
