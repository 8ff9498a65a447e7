"""Compiles the loops, so that tests in several processes find them on disk."""

from __future__ import annotations

import importlib.util
import tempfile
from itertools import product
from pathlib import Path
from typing import Final

from pdrt.modelspec import Quantize
from tests.device import tiny

DTYPES: Final = ("float32", "bfloat16")
QUANTIZED: Final[tuple[Quantize, ...]] = ("none", "int8")


def main() -> None:
    if importlib.util.find_spec("numba") is None:
        return
    with tempfile.TemporaryDirectory() as folder:
        tiny.make("llama_wide_heads", Path(folder))
        for dtype, quantize in product(DTYPES, QUANTIZED):
            tiny.runner(Path(folder), dtype, quantize=quantize, kernels="compiled")


if __name__ == "__main__":
    main()
