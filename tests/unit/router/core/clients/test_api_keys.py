"""Files of keys: what is a key, and whose it is."""

from __future__ import annotations

import re
from hashlib import sha256

import pytest

from pdcluster_protocol.errors import ConfigError
from pdcluster_router.core.clients.api_keys import MAX_KEYS, key_in, parse_keys
from pdcluster_router.core.clients.fair_queue import KeyFlow
from pdcluster_router.core.clients.key_limits import KeyLimits


def digest(key: str) -> str:
    return sha256(key.encode()).hexdigest()


def test_each_key_is_known_by_its_digest_and_called_by_its_name() -> None:
    text = f"# ours\n\n{digest('a')}  team-a # until May\r\n{digest('b').upper()}\n  {digest('c')}  -\n"
    keys = parse_keys(text)
    assert [keys.name_of(key) for key in (b"a", b"b", b"c")] == ["team-a", "line-4", "line-5"]
    assert [keys.name_of(key) for key in (b"", b"A", b"a ", digest("a").encode())] == [None] * 4
    assert keys.names == ("team-a", "line-4", "line-5")


@pytest.mark.parametrize(
    "line",
    ["sk-plain-text", "sk-plain-text team-a", digest("sk-plain-text")[1:], digest("sk-plain-text") + "0", "a b c"],
)
def test_a_key_in_plain_text_is_refused_with_the_cure_and_not_quoted(line: str) -> None:
    with pytest.raises(ConfigError, match=r"line 2 is not a SHA-256.*printf %s KEY \| sha256sum") as caught:
        parse_keys(f"{digest('a')} a\n{line}\n")
    assert line not in str(caught.value)
    assert "plain" not in str(caught.value)


def test_a_key_that_is_there_twice_is_refused_with_both_places() -> None:
    with pytest.raises(ConfigError, match="line 2 has the key of team-a again"):
        parse_keys(f"{digest('a')} team-a\n{digest('a')} team-b\n")


def test_limits_stand_behind_the_name_and_keys_of_one_name_share_them() -> None:
    lines = [
        f"{digest('old')}  team-a  max_concurrent=8 requests_per_minute=600  # until May",
        f"{digest('new')} team-a\trequests_per_minute=600 max_concurrent=8",
        f"{digest('b')} team-b prompt_tokens_per_minute=1000000000",
        f"{digest('c')} - max_concurrent=1",
        f"{digest('d')} d",
    ]
    keys = parse_keys("\n".join(lines))
    assert keys.limits == {
        "team-a": KeyLimits(max_concurrent=8, requests_per_minute=600),
        "team-b": KeyLimits(prompt_tokens_per_minute=1_000_000_000),
        "line-4": KeyLimits(max_concurrent=1),
    }


@pytest.mark.parametrize(
    "words",
    ["b", "max_concurrent", "max_concurrent=", "max_concurrent=0", "max_concurrent=-1", "max_concurrent=1.5",
     "max_concurrent=1000000001", "max_concurrent=1 max_concurrent=1", "max_concurrent=1,requests_per_minute=1",
     "weight=0", "weight=101", "weight=", "weight=1.5", "weight=2 weight=2", "priority=11", "priority=-11",
     "priority=+1", "prio=1", "max_concurrency=1", "Max_concurrent=1", "max_concurrent = 1",
     "max_concurrent=1 sk-plain-text"],
)  # fmt: skip
def test_what_is_no_limit_is_refused_with_the_cure_and_not_quoted(words: str) -> None:
    with pytest.raises(
        ConfigError, match=r"line 1 has something else than limits.*max_concurrent=N, requests"
    ) as caught:
        parse_keys(f"{digest('a')} a {words}\n")
    assert "plain" not in str(caught.value)


@pytest.mark.parametrize(
    "words",
    ["max_concurrent=8", "max_concurrent", "max_concurency=8", "Max_concurrent=8", "rpm=8", "weight=3", "priority=-1",
     "weight=0.5", "weight=", "priority=high"],
)  # fmt: skip
def test_a_limit_in_the_place_of_a_name_is_not_taken_for_one(words: str) -> None:
    """However it is spelled: the key would have no limit, and nobody would know."""
    with pytest.raises(ConfigError, match="line 1 has a limit in the place of its name: write a name, or -"):
        parse_keys(f"{digest('a')} {words}\n")


@pytest.mark.parametrize("name", ["team=a", "c2stMQ==", "team-a=", "8"])
def test_a_name_may_have_an_equals_sign(name: str) -> None:
    assert parse_keys(f"{digest('a')} {name}\n").names == (name,)


@pytest.mark.parametrize("words", ["", "max_concurrent=9"])
def test_keys_of_one_name_with_other_limits_are_refused(words: str) -> None:
    with pytest.raises(ConfigError, match="line 2 gives team-a other limits than a line before it"):
        parse_keys(f"{digest('a')} team-a max_concurrent=8\n{digest('b')} team-a {words}\n")


def test_weight_and_priority_stand_behind_the_name_too_and_each_key_has_a_flow() -> None:
    lines = [f"{digest('a')} team-a weight=3 max_concurrent=2 priority=-10", f"{digest('b')} team-b"]
    keys = parse_keys("\n".join([*lines, f"{digest('c')} - priority=4"]))
    assert keys.flow_of("team-a") == KeyFlow("team-a", weight=3, priority=-10)
    assert [keys.flow_of(name) for name in ("team-b", "gone")] == [KeyFlow("team-b"), KeyFlow("gone")]
    assert keys.flow_of("line-3") == KeyFlow("line-3", priority=4)
    assert keys.limits == {"team-a": KeyLimits(max_concurrent=2)}


@pytest.mark.parametrize("words", ["weight=2", "priority=1"])
def test_keys_of_one_name_with_another_turn_are_refused(words: str) -> None:
    with pytest.raises(ConfigError, match="line 2 gives team-a other limits than a line before it, or another turn"):
        parse_keys(f"{digest('a')} team-a\n{digest('b')} team-a {words}\n")


def test_defaults_hold_for_each_key_that_does_not_say_otherwise_wherever_they_stand() -> None:
    lines = [f"{digest('a')} a max_concurrent=8", "defaults max_concurrent=2 requests_per_minute=60 weight=2  # all"]
    keys = parse_keys("\n".join([*lines, f"{digest('b')} b weight=1", f"{digest('c')} defaults"]))
    assert keys.limits == {
        "a": KeyLimits(max_concurrent=8, requests_per_minute=60),
        "b": KeyLimits(max_concurrent=2, requests_per_minute=60),
        "defaults": KeyLimits(max_concurrent=2, requests_per_minute=60),
    }
    assert [keys.flow_of(name).weight for name in ("a", "b", "defaults")] == [2, 1, 2]


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ("defaults\ndefaults weight=1\n", "line 2 has defaults again"),
        ("defaults team-a weight=1\n", "line 1 has something else than limits"),
        ("defaults max_concurrent=1\n", "it has 0 keys"),
    ],
)
def test_defaults_that_cannot_be_used_are_refused(lines: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        parse_keys(lines)


@pytest.mark.parametrize("num_keys", [0, MAX_KEYS + 1])
def test_a_file_without_keys_or_with_too_many_is_refused(num_keys: int) -> None:
    with pytest.raises(ConfigError, match=f"it has {num_keys} keys"):
        parse_keys("# none\n" + "".join(f"{digest(str(number))}\n" for number in range(num_keys)))


@pytest.mark.parametrize("num_keys", [1, MAX_KEYS])
def test_one_key_is_enough_and_as_many_as_are_allowed_are_known(num_keys: int) -> None:
    keys = parse_keys("".join(f"{digest(str(number))}\n" for number in range(num_keys)))
    assert len(keys.names) == num_keys
    assert keys.are_several is (num_keys > 1)


def test_keys_are_not_shown() -> None:
    assert repr(parse_keys(digest("a"))) == "ApiKeys()"


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ([b"Bearer abc"], b"abc"),
        ([b"bearer   abc "], b"abc"),
        ([b"BEARER a b"], b"a b"),
        ([b"Bearer "], None),
        ([b"Bearer"], None),
        ([b"Basic abc"], None),
        ([b"abc"], None),
        ([b"Bearer abc", b"Bearer abc"], None),
        ([], None),
    ],
)
def test_a_request_shows_one_key_or_none(values: list[bytes], key: bytes | None) -> None:
    assert key_in([(b"host", b"x"), *((b"authorization", value) for value in values)]) == key


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ([(b"x-api-key", b"abc")], b"abc"),
        ([(b"x-api-key", b" abc ")], b"abc"),
        ([(b"x-api-key", b"Bearer abc")], b"Bearer abc"),
        ([(b"x-api-key", b"abc"), (b"authorization", b"Bearer abc")], b"abc"),
        ([(b"x-api-key", b"abc"), (b"authorization", b"Bearer xyz")], None),
        ([(b"x-api-key", b"abc"), (b"authorization", b"Basic abc")], None),
        ([(b"x-api-key", b"abc"), (b"x-api-key", b"abc")], None),
        ([(b"x-api-key", b"")], None),
        ([(b"x-api-key", b""), (b"authorization", b"Bearer abc")], b"abc"),
        ([(b"x-api-key", b"abc"), (b"authorization", b"")], b"abc"),
        ([(b"x-api-key", b"abc"), (b"authorization", b"Bearer ")], b"abc"),
        ([(b"x-api-key", b"abc"), (b"authorization", b"bearer")], b"abc"),
        ([(b"x-api-key", b""), (b"authorization", b"Bearer")], None),
        ([(b"x-api-key", b""), (b"authorization", b"Basic abc")], None),
        ([(b"x-api-key", b""), (b"x-api-key", b"abc")], None),
        ([(b"x-api-key", b"bearer")], b"bearer"),
    ],
)
def test_a_key_may_be_shown_as_anthropics_clients_do(headers: list[tuple[bytes, bytes]], key: bytes | None) -> None:
    assert key_in([(b"host", b"x"), *headers]) == key


def test_beside_tokens_a_line_may_name_a_client_of_them_and_the_defaults_hold_for_all_others() -> None:
    text = f"{digest('a')} team-a\njwt:alice max_concurrent=8 weight=3  # a\ndefaults max_concurrent=2 priority=1\n"
    keys = parse_keys(text, has_tokens=True)
    assert keys.names == ("team-a",)
    assert keys.limits == {"team-a": KeyLimits(max_concurrent=2), "jwt:alice": KeyLimits(max_concurrent=8)}
    assert keys.limits_of_others == KeyLimits(max_concurrent=2)
    assert keys.flow_of("jwt:alice") == KeyFlow("jwt:alice", weight=3, priority=1)
    assert keys.flow_of("jwt:bob") == KeyFlow("jwt:bob", priority=1)
    assert keys.name_of(b"jwt:alice") is None
    assert keys.are_several


def test_beside_tokens_a_file_needs_no_key_but_something_to_say() -> None:
    assert parse_keys("defaults weight=2\n", has_tokens=True).names == ()
    with pytest.raises(ConfigError, match="it has 0 keys"):
        parse_keys("# nothing\n", has_tokens=True)


def test_a_key_and_a_client_of_tokens_never_have_one_name() -> None:
    with pytest.raises(ConfigError, match=r"line 1 names its key jwt:..., as clients of tokens: choose another name"):
        parse_keys(f"{digest('a')} jwt:alice\n", has_tokens=True)


def test_without_tokens_a_line_of_their_clients_is_no_key() -> None:
    with pytest.raises(ConfigError, match="line 1 names a client of tokens, which this router does not read"):
        parse_keys("jwt:alice max_concurrent=8\n")
    assert parse_keys(f"{digest('a')} jwt:alice\n").names == ("jwt:alice",)


@pytest.mark.parametrize("words", ["rpm=8", "max_concurrent=8 max_concurrent=8", "team-a", "max_concurrent=0"])
def test_a_line_of_a_client_of_tokens_has_nothing_but_limits(words: str) -> None:
    with pytest.raises(ConfigError, match="line 1 has something else than limits"):
        parse_keys(f"jwt:alice {words}\n", has_tokens=True)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("jwt:*", "line 1 names all clients of tokens: write defaults in place of jwt:*"),
        ("jwt:", "line 1 has no name of a client behind jwt:"),
        ("jwt:max_concurrent=4", "line 1 has no name of a client behind jwt:"),
        ("jwt:" + "a" * 129, "line 1 has no name of a client behind jwt:"),
        ("jwt:\u00e9", "line 1 has no name of a client behind jwt:"),
    ],
)
def test_a_line_that_can_match_no_client_of_tokens_is_refused(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        parse_keys(f"{name} weight=2\n", has_tokens=True)


def test_a_name_of_a_client_of_tokens_may_have_a_number_sign() -> None:
    keys = parse_keys("  jwt:a#b max_concurrent=1 # c\n# jwt:c\n", has_tokens=True)
    assert keys.limits == {"jwt:a#b": KeyLimits(max_concurrent=1)}


def test_the_clients_that_lines_name_are_bounded() -> None:
    lines = "".join(f"jwt:{number}\n" for number in range(MAX_KEYS + 1))
    with pytest.raises(ConfigError, match="write 1 to 1000 lines"):
        parse_keys(lines, has_tokens=True)
