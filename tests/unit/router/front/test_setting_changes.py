"""What a running router takes of new settings, and what it leaves for its next start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.launch import RouterPolicy
from pdcluster_router.front.setting_changes import TAKEN, SettingReader
from pdcluster_router.settings.router_settings import Settings, build_settings

NAMED = {"prefill_urls": ("http://p:1",), "decode_urls": ("http://d:1",)}


class Told:
    """What a file says; tests change it."""

    def __init__(self, **told: Any) -> None:
        self.told = {**NAMED, **told}
        self.reader = SettingReader(self.settings(), self.settings)
        self.running = self.settings().model_copy(update={"port": 40001, "internal_port": 40002})

    def settings(self) -> Settings:
        return build_settings(**self.told)

    def read(self, **told: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
        self.told |= told
        changes = self.reader.read(self.running)
        self.reader.took(changes)
        self.running = changes.running
        return changes.taken, changes.left


def test_nothing_has_changed() -> None:
    told = Told(port=0)
    assert told.read() == ((), ())
    assert (told.running.port, told.running.internal_port) == (40001, 40002)


def test_what_is_taken_holds_and_real_ports_stay() -> None:
    told = Told(port=0)
    assert told.read(idle_timeout_s=7.0, policy="affinity") == (("--policy", "--idle-timeout"), ())
    assert (told.running.idle_timeout_s, told.running.policy) == (7.0, RouterPolicy.AFFINITY)
    assert told.running.port == 40001
    assert told.read() == ((), ())


def test_what_needs_a_restart_stays_as_it_is_and_is_told_each_time() -> None:
    told = Told()
    assert told.read(port=1, idle_timeout_s=7.0) == (("--idle-timeout",), ("--port",))
    assert told.running.port == 40001
    assert told.read() == ((), ("--port",))
    assert told.read(port=8000) == ((), ())


def test_a_setting_that_is_not_given_any_more_has_its_default_again() -> None:
    told = Told(idle_timeout_s=7.0)
    del told.told["idle_timeout_s"]
    assert told.read() == (("--idle-timeout",), ())
    assert told.running.idle_timeout_s == 120.0


def test_settings_that_cannot_be_used_change_nothing() -> None:
    told = Told()
    with pytest.raises(ConfigError, match="--idle-timeout is -1: it should be greater than 0"):
        told.read(idle_timeout_s=-1, policy="affinity")
    assert told.running.policy is RouterPolicy.LEAST_TOKENS
    assert told.read(idle_timeout_s=5.0) == (("--policy", "--idle-timeout"), ())


def test_what_is_taken_must_fit_what_is_left() -> None:
    told = Told(engine_tls_name="e", prefill_urls=("https://p:1",), decode_urls=("https://d:1",))
    with pytest.raises(ConfigError, match="--engine-tls-name: engines are asked by https then, and http://p:1 is not"):
        told.read(engine_tls_name=None, prefill_urls=("http://p:1",))
    assert told.running.prefill_urls == ("https://p:1",)


def test_an_error_names_what_stays_although_it_has_changed(tmp_path: Path) -> None:
    told = Told()
    found = {"discovery": "file", "engines_file": tmp_path, "prefill_urls": None, "decode_urls": None}
    with pytest.raises(ConfigError, match=r"name at least one.*\(with --discovery, --engines-file as before, until a"):
        told.read(**found)


def test_changes_that_were_not_taken_are_read_again() -> None:
    told = Told()
    told.told |= {"idle_timeout_s": 7.0}
    assert told.reader.read(told.running).taken == ("--idle-timeout",)
    assert told.reader.read(told.running).taken == ("--idle-timeout",)


def test_each_taken_setting_exists() -> None:
    assert set(Settings.model_fields) >= TAKEN
