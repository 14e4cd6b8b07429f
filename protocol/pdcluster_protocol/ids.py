"""Names for the things that travel between the parts.

Everything is a ``NewType`` of ``str`` or ``int``, distinct to the type checker. To call one costs as much as to call a
function that returns its argument.
"""

from __future__ import annotations

from typing import Final, NewType

RequestId = NewType("RequestId", str)
"""vLLM's own id of a request inside one engine. Differs between the prefill and the decode engine."""

TransferId = NewType("TransferId", str)
"""One hand-over of one prompt's KV. Made by the router, the same on every part, never reused."""

Attempt = NewType("Attempt", int)
"""The number of a try at a transfer, from 1. Messages of an older attempt are ignored."""
NO_ATTEMPT: Final = Attempt(0)

EngineId = NewType("EngineId", str)
"""The configured name of one vLLM engine. Survives a restart."""

BootId = NewType("BootId", str)
"""One life of one engine. A restarted engine has the same engine id and another boot id."""
