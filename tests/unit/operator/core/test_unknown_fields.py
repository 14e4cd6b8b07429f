from __future__ import annotations

from pdcluster_operator.core.unknown_fields import OLD_WATCH_S, UnknownFields

RAILS = ("spec.transfer.rails",)


def test_what_an_old_watch_does_not_show_is_told_until_no_such_watch_can_be_left() -> None:
    fields = UnknownFields()
    assert fields.told((), now=0) == ()
    assert fields.told(RAILS, now=10) == RAILS
    assert fields.told((), now=10 + OLD_WATCH_S - 1) == RAILS
    assert fields.told((), now=10 + OLD_WATCH_S) == ()
    assert fields.told((), now=10 + OLD_WATCH_S + 1) == ()


def test_each_name_is_remembered_from_when_it_was_shown_last() -> None:
    fields = UnknownFields()
    fields.told(RAILS, now=0)
    assert fields.told(("spec.model.kind",), now=200) == ("spec.model.kind", *RAILS)
    assert fields.forgets_after_s(200) == OLD_WATCH_S - 200
    assert fields.told((), now=OLD_WATCH_S) == ("spec.model.kind",)
    assert fields.told((), now=OLD_WATCH_S + 200) == ()
    assert fields.forgets_after_s(OLD_WATCH_S + 200) is None
