"""The seat of one process among those of a router: its number, its sockets, and the folder that all share.

The keeper writes it into a variable of the process that it starts. Sockets and pipes are inherited by number.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from pdcluster_protocol.errors import ConfigError

SEAT_VARIABLE: Final = "PDCLUSTER_ROUTER_SEAT"


class Seat(msgspec.Struct, frozen=True, kw_only=True):
    """The things that one process was given. All sockets listen already."""

    number: int
    """Unique among the processes that have not ended."""
    life: int
    """Unique among all that the keeper has started."""
    num_seats: int
    folder: Path
    """For the router's processes alone."""
    client_file: int
    """The client port's socket at this place. The keeper has it too, and the successor will."""
    internal_file: int
    """As ``client_file``, of the internal port that all processes have in common."""
    calls_file: int
    """The socket of this process alone, at which engines call it."""
    host: str
    """The address of the sockets, by the settings that the keeper has."""
    port: int
    internal_port: int
    calls_port: int
    loads_file: int
    """The shared loads, a file in memory."""
    word_file: int
    """A pipe: the process writes a byte when it answers, and one each second from then on."""
    keeper_file: int
    """A pipe that ends when the keeper does. No byte comes."""

    @property
    def files(self) -> tuple[int, ...]:
        """All inherited ones."""
        return (
            self.client_file,
            self.internal_file,
            self.calls_file,
            self.loads_file,
            self.word_file,
            self.keeper_file,
        )

    def encoded(self) -> str:
        """As the variable has it."""
        return msgspec.json.encode(self, enc_hook=str).decode()


def read_seat(environ: Mapping[str, str]) -> Seat | None:
    """The seat of this process; None: no keeper has started it.

    Raises:
        ConfigError: The keeper is another release's.
    """
    told = environ.get(SEAT_VARIABLE)
    if not told:
        return None
    try:
        return msgspec.json.decode(told, type=Seat, dec_hook=lambda kind, value: kind(value))
    except msgspec.DecodeError as error:
        raise ConfigError(f"{SEAT_VARIABLE}: {error}: another release has set it, start the router anew") from error


def internal_ports(own: int | None, seat: Seat | None) -> frozenset[int | None]:
    """The ports for engines, the operator and monitoring: ``own`` alone, or also the one that all processes share."""
    return frozenset((own,) if seat is None else (own, seat.internal_port))
