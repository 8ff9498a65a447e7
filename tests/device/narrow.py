"""Softmax shares as a processor with short vectors computes them, whatever this one has.

A process for itself, since the loops fix their vectors when they are imported. Arguments: the
features that the processor is to have. Raises when a share is wrong.
"""

from __future__ import annotations

import sys

import llvmlite.binding as llvm
import numba
import numpy as np


def main(features: list[str]) -> None:
    real, llvm.get_host_cpu_features = (
        llvm.get_host_cpu_features,
        lambda: dict.fromkeys(features, True),
    )
    from pdrt.device.jit import lines, vectors

    llvm.get_host_cpu_features = real
    assert vectors.LANES < 16
    place = numba.njit(
        lambda scores, state: lines.softmax(
            np.float32(0), scores.ctypes.data, 4, state.ctypes.data, scores.ctypes.data
        )
    )
    hidden, broken = -np.inf, np.nan
    scores = np.tile(np.array([[0], [-1], [hidden], [-140]], np.float32), 16)
    scores[1, 3] = broken
    state = np.zeros((3, 16), np.float32)
    state[0] = hidden
    place(scores, state)
    whole = np.delete(scores, 3, axis=1)
    np.testing.assert_allclose(whole[:2], np.tile([[1], [0.5]], 15), rtol=3e-7)
    assert (whole[2:] == 0).all()
    assert (np.delete(state[2], 3) == 0).all(), "nothing came before"
    assert np.isnan(state[1, 3]), "what is no number is not hidden"


if __name__ == "__main__":
    main(sys.argv[1:])
