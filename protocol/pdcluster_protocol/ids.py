"""Names for the things that travel between the parts.

Everything is a ``NewType`` of ``str`` or ``int``: free at run time, distinct to the type checker.
"""

from __future__ import annotations

from typing import NewType

RequestId = NewType("RequestId", str)
"""vLLM's own id of a request inside one engine. Differs between the prefill and the decode engine."""

TransferId = NewType("TransferId", str)
"""One hand-over of one prompt's KV. Made by the router, the same on every part, never reused."""

Attempt = NewType("Attempt", int)
"""The number of a transfer's try, in [1, inf). Messages of an older attempt are ignored."""

EngineId = NewType("EngineId", str)
"""The configured name of one vLLM engine. Survives a restart."""

BootId = NewType("BootId", str)
"""One life of one engine. A restarted engine has the same engine id and another boot id."""
