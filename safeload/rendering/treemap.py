"""Lay out sizes as a treemap: rectangles that fill an area, each as large as its share, and as square as can be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Tile(NamedTuple):
    """One rectangle, in the units of the area that it was laid out in."""

    x: float
    y: float
    width: float
    height: float


def tiles(sizes: Sequence[int], width: float, height: float) -> list[Tile]:
    """Return a rectangle for each size, in order, which together fill `width` times `height`.

    The squarified layout of Bruls, Huizing and van Wijk (2000): rows are filled along the shorter side for as long as
    that makes their tiles more square.

    Args:
        sizes: Largest first, none zero.
        width: Of the area.
        height: Of the area.
    """
    scale = width * height / sum(sizes)
    areas = [size * scale for size in sizes]
    placed: list[Tile] = []
    x = y = 0.0
    start = 0
    while start < len(areas):
        side = min(width, height)
        end, row = start + 1, areas[start]
        # Largest and smallest of a row decide how far from square its worst tile is.
        while end < len(areas) and _worst(areas[start], areas[end], row + areas[end], side) <= _worst(
            areas[start], areas[end - 1], row, side
        ):
            row += areas[end]
            end += 1
        depth = row / side if side > 0 else 0.0
        along = 0.0
        for area in areas[start:end]:
            length = area / depth if depth > 0 else 0.0
            placed.append(Tile(x, y + along, depth, length) if width >= height else Tile(x + along, y, length, depth))
            along += length
        if width >= height:
            x, width = x + depth, max(0.0, width - depth)
        else:
            y, height = y + depth, max(0.0, height - depth)
        start = end
    return placed


def _worst(largest: float, smallest: float, row: float, side: float) -> float:
    """Return the largest ratio of sides in a row of tiles along a side."""
    square = side * side
    return max(square * largest / (row * row), row * row / (square * smallest)) if square > 0 else 0.0
