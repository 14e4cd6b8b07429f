"""The law of aliases: what the CRD's schema takes, a router takes. Else its pods would not start."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from drawn import drawn
from pdcluster_operator.api.router import Alias
from pdcluster_router.settings.forms import ModelAlias

NAMES = st.text(min_size=1, max_size=12)


@given(NAMES, NAMES)
@settings(max_examples=drawn(1500), deadline=None)
def test_a_router_takes_every_alias_that_the_schema_takes(name: str, model: str) -> None:
    try:
        alias = Alias(name=name, model=model)
    except ValidationError:
        return
    taken = TypeAdapter(ModelAlias).validate_python(f"{alias.name}={alias.model}")
    assert taken == f"{name}={model}"
