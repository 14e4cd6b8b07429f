"""Who may be connected."""

from __future__ import annotations

from pdcluster_router.front.clients import Clients


class Connection:
    def __init__(self, clients: Clients) -> None:
        self.clients = clients
        self.is_open = True
        self.is_member = clients.opened(self)

    def abort(self) -> None:
        self.is_open = False
        self.clients.closed(self)


def test_beyond_the_limit_there_are_guests_and_the_oldest_silent_one_makes_room() -> None:
    clients = Clients(2)
    connections = [Connection(clients) for _ in range(5)]
    assert [connection.is_member for connection in connections] == [True, True, False, False, False]
    assert [connection.is_open for connection in connections] == [True, True, False, True, True]
    assert clients.num_open == 4


def test_a_guest_that_speaks_is_not_put_out_for_one_that_says_nothing() -> None:
    clients = Clients(1)
    _, speaking = Connection(clients), Connection(clients)
    assert not clients.may_stay(speaking)
    late = Connection(clients)
    assert (speaking.is_open, late.is_open) == (True, False)


def test_a_guest_becomes_a_member_once_one_has_left() -> None:
    clients = Clients(1)
    member, guest = Connection(clients), Connection(clients)
    member.abort()
    assert clients.may_stay(guest)
    assert not Connection(clients).is_member
    guest.abort()
    assert clients.num_open == 1


def test_parts_beyond_the_first_take_places_of_clients() -> None:
    clients = Clients(4)
    assert clients.parts.take(2)
    connections = [Connection(clients) for _ in range(4)]
    assert [connection.is_member for connection in connections] == [True, True, True, False]
    assert not clients.may_stay(connections[-1])
    clients.parts.give_back(2)
    assert clients.may_stay(connections[-1])
