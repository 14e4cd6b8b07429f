"""How one lane asks decode for grants: each push says the content of its LoRA adapter.

A push whose adapter's content is not known yet asks later. Its blocks wait, as those of any push without a grant.
"""

from __future__ import annotations

from typing import Final

from pdcluster_connector.adapter_loads import AdapterLoads
from pdcluster_connector.core.adapters import UnknownContent
from pdcluster_connector.core.clock import remaining_ms
from pdcluster_connector.settings import ADAPTER_WAIT_S
from pdcluster_connector.worker.orders import StepBegun
from pdcluster_connector.worker.pushes import LivePush, PushBook
from pdcluster_protocol.adapters import AdapterContent
from pdcluster_protocol.ids import BootId
from pdcluster_protocol.side_channel import Open

_CHANGED: Final = "LoRA adapter {!r} was loaded again with other files while the prompt was computed"


class Asker:
    """Asks for the grants of one lane's pushes. Lane thread only."""

    def __init__(self, book: PushBook, decode_boot_id: BootId, adapters: AdapterLoads | None) -> None:
        self._book = book
        self._boot_id = decode_boot_id
        self._adapters = adapters
        self._late: dict[LivePush, float] = {}
        """Pushes that ask later, and until when they may."""

    def ask(self, live: LivePush, now: float) -> None:
        """Decode is asked, or will be as soon as the content of the push's adapter is known."""
        found = self._content(live)
        if not isinstance(found, UnknownContent):
            self._late.pop(live, None)
            left, push = remaining_ms(live.push.deadline, now=now), live.push
            self._book.apply(live, push.opening(Open(*push.key, self._boot_id, left, live.attempt_token, found)))
        elif found.is_final or now >= self._late.setdefault(live, now + ADAPTER_WAIT_S):
            self._late.pop(live, None)
            self._book.apply(live, live.push.give_up(found.reason, now=now))

    def ask_late(self, now: float) -> None:
        """The pushes that were not ready to ask before ask now, if they are."""
        for live in list(self._late):
            if live.push.is_ended:
                del self._late[live]
            else:
                self.ask(live, now)

    def require_same_load(self, live: LivePush, step: StepBegun, now: float) -> None:
        """``step`` computes more of the same prompt. If it does so with another load of the adapter than before, the
        push is given up: its KV would be of two adapters."""
        load = step.adapters.get(live.request_id)
        if load is not None and live.adapter is not None and load != live.adapter:
            self._book.apply(live, live.push.give_up(_CHANGED.format(load.name), now=now))

    def _content(self, live: LivePush) -> AdapterContent | UnknownContent | None:
        if live.adapter is None:
            return None
        assert self._adapters is not None, "a request with an adapter on an engine without"
        return self._adapters.content(live.adapter)
