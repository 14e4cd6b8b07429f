class KVConnectorFactory:
    _registry: dict[str, object]
    @classmethod
    def register_connector(cls, name: str, module_path: str, class_name: str) -> None: ...
