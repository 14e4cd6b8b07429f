"""``spec.model``: where the weights are, and the name by which clients ask for them."""

from __future__ import annotations

from pydantic import Field

from pdcluster_operator.api.base import ApiModel, Fault, OpenObject, Rule


class Volume(ApiModel):
    """A volume that holds the model."""

    source: OpenObject = Field(min_length=1, max_length=1, json_schema_extra={"minProperties": 1, "maxProperties": 1})
    """A pod's volume source, one key: persistentVolumeClaim, image, csi, nfs, hostPath and so on. Mounted read-only."""
    path: str = Field(default="", max_length=1024)
    """Folder of the model within the volume. Default: the volume's root."""


def name_in(model: str) -> str:
    """A CEL expression: what clients ask for."""
    return f"has({model}.servedName) ? {model}.servedName : has({model}.name) ? {model}.name : ''"


class Model(ApiModel):
    """The model, and the name by which clients ask for it."""

    name: str | None = Field(default=None, min_length=1, max_length=256)
    """Name on the model hub. Default: none; exactly one of name, path and volume is given."""
    path: str | None = Field(default=None, min_length=1, max_length=1024)
    """Folder in the engine's container, from the image or from a volume of podOverrides. Default: none."""
    volume: Volume | None = None
    """Volume that holds the model. Default: none."""
    served_name: str | None = Field(default=None, min_length=1, max_length=256)
    """Name that clients ask for. Default: model.name; with path or volume it must be given. Cannot change, for a
    request in the middle of a rollout would meet engines that do not know its name."""
    revision: str | None = Field(default=None, min_length=1, max_length=256)
    """Branch, tag or commit on the model hub; only with name. Default: the hub's own default."""

    rules = (
        Rule(
            holds="[has(self.name), has(self.path), has(self.volume)].filter(given, given).size() == 1",
            says="model has %s, %s and %s: give exactly one of name, path and volume",
            values=(
                "has(self.name) ? 'name ' + self.name : 'no name'",
                "has(self.path) ? 'path ' + self.path : 'no path'",
                "has(self.volume) ? 'a volume' : 'no volume'",
            ),
            short="give exactly one of model.name, model.path and model.volume",
        ),
        Rule(
            holds="has(self.servedName) || has(self.name)",
            says="%s has no name that clients could ask for: set model.servedName",
            values=("has(self.path) ? 'model.path ' + self.path : 'model.volume'",),
            short="model.servedName is missing: clients need a name to ask for",
            path=".servedName",
            fault=Fault.REQUIRED,
        ),
        Rule(
            holds="!has(self.revision) || has(self.name)",
            says="model.revision %s names a revision on the model hub, and model.name is not set: "
            "leave revision out, or set name",
            values=("self.revision",),
            short="model.revision needs model.name: leave revision out, or set name",
            path=".revision",
        ),
        Rule(
            holds=f"({name_in('self')}) == ({name_in('oldSelf')})",
            says="the name that clients ask for cannot change from %s to %s: keep model.servedName %s, or make another "
            "PDCluster and move the clients to it",
            values=(name_in("oldSelf"), name_in("self"), name_in("oldSelf")),
            short="the name that clients ask for cannot change: make another PDCluster and move the clients to it",
            path=".servedName",
        ),
    )

    @property
    def public_name(self) -> str:
        """The name by which clients ask for the model."""
        return self.served_name or self.name or ""
