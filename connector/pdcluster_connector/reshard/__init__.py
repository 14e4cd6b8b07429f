"""Puts KV for another TP size together in staging memory before it leaves. Files outside of this folder import only the
names below; import-linter checks that.
"""

from pdcluster_connector.reshard.feeds import ReshardItem, TokenPages, TokenShape
from pdcluster_connector.reshard.resharder import (
    Resharded,
    Resharder,
    ResharderContext,
    ReshardFailed,
    ReshardOutcome,
    StepRead,
)
from pdcluster_connector.reshard.rounds import GroupRank, StagedPart, write_rows
from pdcluster_connector.reshard.staging import StagingBuffer, StagingMemory
from pdcluster_connector.reshard.strip_staging import GatheredStrips, StripGatherer, StripStaging, bytes_from
from pdcluster_connector.reshard.tensors import TokenRegion, open_reshard_group, region_bytes

__all__ = [
    "GatheredStrips",
    "GroupRank",
    "ReshardFailed",
    "ReshardItem",
    "ReshardOutcome",
    "Resharded",
    "Resharder",
    "ResharderContext",
    "StagedPart",
    "StagingBuffer",
    "StagingMemory",
    "StepRead",
    "StripGatherer",
    "StripStaging",
    "TokenPages",
    "TokenRegion",
    "TokenShape",
    "bytes_from",
    "open_reshard_group",
    "region_bytes",
    "write_rows",
]
