from __future__ import annotations

import struct
from pathlib import Path

import pytest
from e2e.dns import Code, Services, make_answer, parse_question, reply, service_of

NAME = b"\x0btiny-router\x07default\x03svc\x07cluster\x05local\x00"


def packet(name: bytes = NAME, kind: int = 1, num_questions: int = 1) -> bytes:
    return struct.pack("!6H", 7, 0x0100, num_questions, 0, 0, 0) + name + struct.pack("!HH", kind, 1)


def counts(answer: bytes) -> tuple[int, int, int]:
    """Number, code, records."""
    number, flags, _, records, _, _ = struct.unpack_from("!6H", answer)
    return number, flags & 0xF, records


def test_a_question_is_read_with_its_name_in_small_letters() -> None:
    question = parse_question(packet(NAME.replace(b"tiny", b"TINY")))
    assert (question.number, question.kind) == (7, 1)
    assert service_of(question.labels) == ("tiny-router", "default")


@pytest.mark.parametrize("raw", [b"", b"\x00" * 11, packet(num_questions=2), packet(b"\xc0\x0c")])
def test_bytes_that_are_no_question_are_refused(raw: bytes) -> None:
    with pytest.raises(ValueError, match=r"header|questions|compressed"):
        parse_question(raw)


@pytest.mark.parametrize("name", ["default.svc.cluster.local", "a.b.c.svc.cluster.local", "a.b.pod.cluster.local", ""])
def test_only_names_of_services_are_services(name: str) -> None:
    assert service_of(tuple(name.split("."))) is None


def test_an_address_is_answered_in_the_questions_own_words() -> None:
    question = parse_question(packet())
    answer = make_answer(question, "10.96.0.7", Code.DONE)
    assert counts(answer) == (7, 0, 1)
    assert answer[12 : 12 + len(question.raw)] == question.raw
    assert answer.endswith(struct.pack("!HHHIH4B", 0xC00C, 1, 1, 1, 4, 10, 96, 0, 7))


def test_a_name_that_exists_has_no_address_of_another_kind() -> None:
    assert counts(make_answer(parse_question(packet(kind=28)), "10.96.0.7", Code.DONE)) == (7, 0, 0)


def test_the_world_outside_does_not_exist_and_nobody_is_asked_about_it() -> None:
    nobody = Services("https://127.0.0.1:1", Path("/nonexistent"), "token")
    assert counts(reply(packet(b"\x07example\x03com\x00"), nobody)) == (7, Code.NO_SUCH_NAME.value, 0)


def test_an_api_server_that_is_away_is_no_reason_to_say_that_a_service_does_not_exist(tmp_path: Path) -> None:
    nobody = Services("https://127.0.0.1:1", tmp_path / "none", "token")
    assert counts(reply(packet(), nobody)) == (7, Code.NOT_NOW.value, 0)
