"""Sizes of tiles and panels, for those who lay out what the loops compute."""

from __future__ import annotations

from typing import Final

TILE: Final = 16  # rows of a tile, tokens of a panel
DEEP: Final = 32  # values of a row that one instruction multiplies
