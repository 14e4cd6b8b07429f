"""Every error of ours, sorted by whose fault it is and what helps.

PDClusterError
  ConfigError      our user's settings: stop at start, tell the cure
  ProtocolError    a peer broke the rules: no retry
  Unavailable      this engine cannot do it now: another one may
  TransferError    bytes were not (or not surely) written: the attempt has failed
"""

from __future__ import annotations

from typing import Final

import msgspec

NO_JSON: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""msgspec's errors for a peer's bytes: no JSON or msgpack of the type, text that is not UTF-8, or too deep nesting."""


class PDClusterError(Exception):
    """Root of all errors that pdcluster raises on purpose."""


class ConfigError(PDClusterError):
    """The settings cannot work. The message names both values and the cure."""


class ProtocolError(PDClusterError):
    """A peer said something that the protocol does not allow. Retrying cannot help."""


class Unavailable(PDClusterError):
    """An engine cannot be reached or will not serve now. Another engine may."""


class TransferError(PDClusterError):
    """KV bytes were not written, or it is unknown whether they were."""
