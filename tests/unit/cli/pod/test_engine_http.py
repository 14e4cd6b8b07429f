"""What a failed question says of the engine."""

from __future__ import annotations

import socket

import pytest

from pdcluster_cli.pod.engine_http import NoAnswer, NotThere, ask, nameless


def test_a_name_that_nobody_has_any_more_means_that_the_engine_is_gone() -> None:
    """A worker's drain asks its leader by name: else it would wait its whole time for a leader that has gone."""
    told = nameless("pool-0.pool", socket.gaierror(socket.EAI_NONAME, "Name or service not known"))
    assert isinstance(told, NotThere)
    assert str(told) == "the name pool-0.pool does not exist"


def test_a_question_to_a_name_that_nobody_has_is_answered_so() -> None:
    """No name server is asked for a name with colons that is no address."""
    with pytest.raises(NotThere, match="the name fe80::zz does not exist"):
        ask("fe80::zz", 8000, "/health", timeout_s=1)


def test_a_name_server_that_is_away_says_nothing_of_the_engine() -> None:
    told = nameless("pool-0.pool", socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"))
    assert isinstance(told, NoAnswer)
    assert "pool-0.pool is not known: Temporary failure" in str(told)
