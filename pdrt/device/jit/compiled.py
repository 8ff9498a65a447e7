"""How a loop is compiled, and where that is kept.

Numba asks only whether the function's own file has changed, not whether those that it calls have:
so the folder bears a digest of all of them.
"""

from __future__ import annotations

import hashlib
from functools import partial
from pathlib import Path
from typing import Final

import numba

from pdrt.config import cache_dir


def _folder() -> Path:
    sources = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
    digest = hashlib.sha256(sources).hexdigest()[:16]
    asked = numba.config.CACHE_DIR  # $NUMBA_CACHE_DIR
    return (Path(asked) if asked else cache_dir()) / f"kernels-{digest}"


# Here, for numba looks there when a loop is defined.
numba.config.CACHE_DIR = str(_folder())

# Without the interpreter's lock; what is divided by zero is infinite, as everywhere in torch.
loop: Final = partial(numba.njit, nogil=True, cache=True, error_model="numpy")
