"""Of the stand-in for torch_npu."""


def _register_atb_extensions() -> None:
    """There is no ATB to register."""
