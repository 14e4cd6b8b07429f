"""News of requests with LoRA adapters, on a decode rank: they wait until the adapter's content is known.

A prefill rank that asks to write for such a request meanwhile is parked, as before any announcement. The content is
looked up once more when all KV has come: an adapter that was loaded again by then would decode from foreign KV.
``first_steps.py`` looks at it a last time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, TypeAlias

from pdcluster_connector.adapter_loads import AdapterLoads
from pdcluster_connector.core.adapters import AdapterLoad, AdapterRequest, ContentAnswer, UnknownContent
from pdcluster_connector.settings import ADAPTER_WAIT_S
from pdcluster_connector.steps import Cancel, Expect, PrefillEnded
from pdcluster_protocol.adapters import AdapterContent
from pdcluster_protocol.ids import RequestId

News: TypeAlias = Expect | PrefillEnded | Cancel
"""News of one request, from the scheduler to a decode rank."""

_CHANGED: Final = "decode has loaded LoRA adapter {!r} again, with other files, while the KV was on its way"


@dataclass(frozen=True, slots=True)
class RequestAdapter:
    """The adapter of one request. ``load``, ``found``: what this rank had of it when the request was told."""

    asked: AdapterRequest
    load: AdapterLoad
    found: ContentAnswer


class HeldNews:
    """Of one decode rank. Receiver thread only."""

    def __init__(self, adapters: AdapterLoads | None) -> None:
        self._adapters = adapters
        self._held: list[tuple[News, float]] = []
        self._until: dict[RequestId, float] = {}
        """Of requests whose news are held: when they are told anyway, to fail."""
        self._known: dict[RequestId, RequestAdapter] = {}
        """Of requests with an adapter that were told."""

    def __len__(self) -> int:
        return len(self._held)

    def due(self, news: Iterable[tuple[News, float]], now: float) -> list[tuple[News, float]]:
        """The news that may be told now, of ``news`` and of those that were held; each request's in their order.

        A request that is cancelled is told at once: it needs no content any more.
        """
        items, self._held = [*self._held, *news], []
        cancelled = {item.request_id for item, _ in items if isinstance(item, Cancel)}
        waiting: set[RequestId] = set()
        due = []
        for item, at in items:
            request_id = item.request_id
            if request_id in waiting or (self._must_wait(item, now) and request_id not in cancelled):
                waiting.add(request_id)
                self._held.append((item, at))
            else:
                self._until.pop(request_id, None)
                due.append((item, at))
        return due

    def content(self, request_id: RequestId) -> AdapterContent | UnknownContent | None:
        """The content of the adapter of a request that was told; None: it has none."""
        known = self._known.get(request_id)
        return known.found if known else None

    def take(self, request_id: RequestId) -> RequestAdapter | None:
        """The adapter of a request whose KV is here, or will not come; None: it has none. Forgets the request."""
        return self._known.pop(request_id, None)

    def change(self, adapter: RequestAdapter) -> str:
        """Why decode may not use KV of ``adapter`` now; empty: it may, for all that is known of it."""
        now = self._look_up(adapter.asked)
        if now.load == adapter.load or now.found == adapter.found:
            return ""
        if isinstance(now.found, UnknownContent) and now.found.is_final:
            return now.found.reason
        return _CHANGED.format(adapter.asked.name)

    def _must_wait(self, item: News, now: float) -> bool:
        if not isinstance(item, Expect) or item.adapter is None:
            return False
        known = self._known[item.request_id] = self._look_up(item.adapter)
        is_pending = isinstance(known.found, UnknownContent) and not known.found.is_final
        return is_pending and now < self._until.setdefault(item.request_id, now + ADAPTER_WAIT_S)

    def _look_up(self, asked: AdapterRequest) -> RequestAdapter:
        """An error of vLLM's list or the file system costs this request, and none of those whose news came with it."""
        assert self._adapters is not None, "a request with an adapter on an engine without"
        try:
            load = self._adapters.at_hand(asked)
            return RequestAdapter(asked, load, self._adapters.content(load))
        except (AttributeError, LookupError, RuntimeError, OSError) as error:
            problem = f"LoRA adapter {asked.name!r} cannot be looked up: {error!r}"
            load = AdapterLoad(asked.name, asked.use, problem=problem)
            return RequestAdapter(asked, load, UnknownContent(problem, is_final=True))
