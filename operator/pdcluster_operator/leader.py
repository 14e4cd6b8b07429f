"""Takes part in the election for one Lease, and runs a term while it leads.

``core/leasing.py`` has the rules. This file reads and writes the Lease, starts a term when the Lease is ours, and ends
the term when its time is up, whether or not the API server answers. On the way out it gives the Lease back, so that the
next leader need not wait.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from typing import Any, Final

from pdcluster_operator.clock import Clock, micro_time, steady_s
from pdcluster_operator.core.leasing import Candidate, LeaseRecord, LeaseTimes
from pdcluster_operator.errors import Conflict, Exists, KubeError
from pdcluster_operator.http_kube import HttpKube
from pdcluster_operator.kinds import LEASE, Object, Ref

logger = logging.getLogger(__name__)

_JITTER: Final = 0.2
_PARTING_S: Final = 2.0
"""Seconds to give the Lease back. If that fails, the other candidates wait for the Lease's duration."""


class Leader:
    """One candidate. ``left_s`` makes it the ``Fence`` of all writes. One task runs ``run``; any task may read."""

    def __init__(
        self,
        kube: HttpKube,
        *,
        namespace: str,
        name: str,
        identity: str,
        times: LeaseTimes,
        lead: Callable[[], Awaitable[None]],
        clock: Clock = steady_s,
        parting_s: float = _PARTING_S,
    ) -> None:
        """``kube``: has no fence; its deadline is well below ``renew_s``. ``lead``: works until it is cancelled, which
        happens when the term ends."""
        self._kube = kube
        self._ref = Ref(LEASE, namespace, name)
        self._candidate = Candidate(identity, times)
        self._lead = lead
        self._clock = clock
        self._parting_s = parting_s
        self._lease: Object | None = None
        """The Lease as we last read or wrote it. None: not known, or there is none."""
        self._won = asyncio.Event()
        self._is_troubled = False

    def left_s(self) -> float:
        """Seconds for which we lead for certain; 0 or less: we do not lead."""
        return self._candidate.leads_until - self._clock()

    @property
    def is_leading(self) -> bool:
        return self.left_s() > 0

    @property
    def holder(self) -> str:
        """The replica that leads as far as we know; empty: none."""
        return self._candidate.seen.holder if self._candidate.seen else ""

    async def run(self) -> None:
        """Take part until cancelled, or until a term fails. Then end the term, and give the Lease back."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._campaign(), name="leader: campaign")
                tasks.create_task(self._serve_terms(), name="leader: terms")
        finally:
            await self._part()

    async def _campaign(self) -> None:
        while True:
            await self._look()
            is_ours = self._candidate.leads(self._clock())
            await asyncio.sleep(self._candidate.times.retry_s * (1.0 if is_ours else 1 + _JITTER * random.random()))  # noqa: S311

    async def _look(self) -> None:
        """One try to lead, or to go on leading."""
        try:
            await self._try_to_lead()
        except KubeError as error:
            self._lease = None  # Another candidate may hold the Lease now: read it again.
            if not self._is_troubled:
                logger.warning("lease not renewed or read lease=%s reason=%s", self._ref, error)
            self._is_troubled = True
        else:
            self._is_troubled = False

    async def _try_to_lead(self) -> None:
        if self._lease is None or not self._candidate.leads(self._clock()):
            await self._read()
        if self._candidate.may_write(self._clock()):
            await self._write()

    async def _read(self) -> None:
        self._lease = await self._kube.get(self._ref)
        if self._lease is not None:
            self._candidate = self._candidate.observed(_record_of(self._lease), self._clock())

    async def _write(self) -> None:
        began, renewed = self._clock(), micro_time()
        record = self._candidate.claim(renewed)
        manifest = self._manifest(record)
        try:
            self._lease = await (self._kube.create(manifest) if self._lease is None else self._kube.replace(manifest))
        except Exists:
            # Another candidate was first. Read its record: even if the Lease is deleted, we then wait for that leader.
            await self._read()
            return
        self._candidate = self._candidate.written(record, began=began, now=self._clock())
        if self._candidate.leads(self._clock()):
            self._won.set()

    def _manifest(self, record: LeaseRecord) -> dict[str, Any]:
        """The Lease to store: the one that is there with our record in it, or a new one."""
        before: Object = (self._lease or {}).get("spec") or {}
        is_same = before.get("holderIdentity") == record.holder and "acquireTime" in before
        spec = {
            "holderIdentity": record.holder,
            "leaseDurationSeconds": max(1, round(record.duration_s)),
            "acquireTime": before["acquireTime"] if is_same else record.renewed,
            "renewTime": record.renewed,
            "leaseTransitions": record.transitions,
        }
        metadata = {"name": self._ref.name, "namespace": self._ref.namespace}
        kept = (self._lease or {}).get("metadata", metadata)
        return {"apiVersion": LEASE.api_version, "kind": LEASE.name, "metadata": kept, "spec": spec}

    async def _serve_terms(self) -> None:
        while True:
            await self._won.wait()
            if self.is_leading:
                logger.info("leading lease=%s identity=%s", self._ref, self._candidate.identity)
                await self._serve_term()
                logger.warning("no longer leading lease=%s holder=%s", self._ref, self.holder or "none")
            self._won.clear()
            if self.is_leading:  # We won the Lease again before the event was cleared.
                self._won.set()

    async def _serve_term(self) -> None:
        term = asyncio.ensure_future(self._lead())
        try:
            while (left_s := self.left_s()) > 0:
                done, _ = await asyncio.wait({term}, timeout=left_s)
                if done:
                    term.result()
                    raise RuntimeError("a term ended by itself")
        finally:
            term.cancel()
            await asyncio.wait({term})

    async def _part(self) -> None:
        """Give the Lease back, if we hold it. The term is over."""
        self._candidate = self._candidate.resigned()
        record = self._candidate.parting(micro_time())
        if record is None:
            return
        try:
            async with asyncio.timeout(self._parting_s):
                is_given_back = await self._give_back(record)
        except (KubeError, TimeoutError) as error:
            logger.warning("lease not given back lease=%s reason=%s", self._ref, error)
        else:
            if is_given_back:
                logger.info("lease given back lease=%s", self._ref)
            else:
                logger.info("lease is not ours any more lease=%s", self._ref)

    async def _give_back(self, record: LeaseRecord) -> bool:
        """Give the Lease back. Returns whether it was still ours.

        A renewal that was cut off may still have reached the API server. So the Lease is read first, and read a second
        time if the renewal arrives between our read and our write.
        """
        for is_last in (False, True):
            self._lease = await self._kube.get(self._ref)
            if self._lease is None or _record_of(self._lease).holder != self._candidate.identity:
                return False
            try:
                await self._kube.replace(self._manifest(record))
            except Conflict:
                if is_last:
                    raise
            else:
                return True
        raise AssertionError("unreachable")


def _record_of(lease: Object) -> LeaseRecord:
    spec: Object = lease.get("spec") or {}
    return LeaseRecord(
        spec.get("holderIdentity") or "",
        float(spec.get("leaseDurationSeconds") or 0),
        str(spec.get("renewTime") or ""),
        int(spec.get("leaseTransitions") or 0),
    )
