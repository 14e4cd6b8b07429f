"""What a start says while it goes on."""

from __future__ import annotations

import re
import time
from pathlib import Path

from pdcluster_cli.local.pool import _import_once
from pdcluster_cli.zygote import Ready, Zygote


class SlowImport(Zygote):
    """Has imported at the second question; the first one is answered after ``news_s`` seconds."""

    def __init__(self, news_s: float) -> None:
        self.log_path = Path("import.log")
        self._answers = iter([None, Ready(import_s=news_s, num_threads=1)])
        self._news_s = news_s

    def wait_ready(self, timeout_s: float | None) -> Ready | None:
        time.sleep(self._news_s)
        return next(self._answers)


def test_an_import_that_goes_on_says_for_how_many_seconds_it_has() -> None:
    said: list[str] = []
    _import_once(SlowImport(0.6), said.append, 3600.0)
    begin, news, end = said
    assert (begin, end) == ("importing vLLM once, for all engines", "imported in 0.6 s")
    (seconds,) = re.findall(r"^still importing \((\d+) s\)$", news)
    assert int(seconds) >= 1
