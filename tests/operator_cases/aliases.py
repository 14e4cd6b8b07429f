"""Aliases of models that the API server takes or refuses, and the message it must show."""

from __future__ import annotations

from typing import Final

from operator_cases.objects import Accepted, By, Object, Refused


def aliases(**models: str) -> Object:
    """Changes of a PDCluster: its aliases."""
    return {"spec.router.modelAliases": [{"name": name, "model": model} for name, model in models.items()]}


_TWICE: Final = [{"name": "fast", "model": model} for model in ("tiny", "sql")]
ACCEPTED_ALIASES: Final = (
    Accepted("an alias in another script", aliases(**{"\u6a21\u578b-1": "tiny"})),
    Accepted("an alias of the model and one of an adapter", aliases(fast="tiny", db="org/sql:v1=2")),
    Accepted(
        "as many aliases as may be, of the longest names", aliases(**{f"{one:0128}": "m" * 128 for one in range(16)})
    ),
    Accepted("an alias in a pool that runs", aliases(fast="tiny"), before={}),
)
REFUSED_ALIASES: Final = (
    Refused(
        "an alias of two models",
        {"spec.router.modelAliases": _TWICE},
        'spec.router.modelAliases[1]: Duplicate value: {"name":"fast"}',
    ),
    Refused(
        "an alias of an alias",
        aliases(fast="slow", slow="tiny"),
        "router.modelAliases names slow itself: give fast the name of a model",
    ),
    Refused(
        "an alias of itself",
        aliases(fast="fast"),
        "router.modelAliases names fast itself: give fast the name of a model",
    ),
    Refused(
        "an alias that is the model's own name",
        aliases(tiny="sql"),
        "router.modelAliases names tiny, and the model is called so: leave it out",
    ),
    *(
        Refused(
            f"an alias with {what}",
            aliases(**{name: "tiny"}),
            "spec.router.modelAliases[0].name in body should match",
            By.SCHEMA,
        )
        for what, name in (
            ("a comma", "a,b"),
            ("an equals sign", "a=b"),
            ("a blank", "a b"),
            ("a line's end", "a\n"),
            ("a blank of a web page", "a\u00a0b"),
            ("a blank without width", "a\u200bb"),
            ("an ideographic blank", "a\u3000b"),
            ("a line's end of Unicode", "a\u2028b"),
            ("a character of private use", "a\ue000b"),
            ("a variable of the pod", "$(POD_IP)"),
        )
    ),
    Refused(
        "an alias of a name that is two",
        aliases(fast="tiny,sql"),
        "spec.router.modelAliases[0].model in body should match",
        By.SCHEMA,
    ),
    Refused(
        "an alias without a model",
        {"spec.router.modelAliases": [{"name": "fast"}]},
        "spec.router.modelAliases[0].model: Required value",
        By.SCHEMA,
    ),
)
