"""Pictures of masks' tiles. Matplotlib is imported when something is drawn."""

from typing import TYPE_CHECKING, Any

import numpy as np

from ._config import EMPTY, FULL, PARTIAL

if TYPE_CHECKING:
    from ._tiles import TileMap

COLOURS = {EMPTY: "#f2f2f2", PARTIAL: "#f4a259", FULL: "#2f5d8a"}
NAMES = {EMPTY: "empty", PARTIAL: "partial", FULL: "full"}
LINES = 40  # up to so many tiles along a side are told apart by white lines


def draw_tiles(tiles: "TileMap", ax: Any, b: int, h: int) -> Any:
    """Tiles of queries downwards, of keys to the right, by colour. Returns the axes."""
    verdicts = _verdicts_of(tiles, b, h)
    try:
        from matplotlib import pyplot
        from matplotlib.colors import ListedColormap
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ImportError(
            "TileMap.draw needs Matplotlib: pip install matplotlib. `print(tiles)` draws small "
            "maps as text."
        ) from error
    if ax is None:
        _, ax = pyplot.subplots()
    colours = ListedColormap([COLOURS[kind] for kind in (EMPTY, PARTIAL, FULL)])
    ax.imshow(verdicts, cmap=colours, vmin=EMPTY, vmax=FULL, interpolation="nearest")
    n, m = verdicts.shape
    if max(n, m) <= LINES:
        ax.set_xticks(np.arange(m + 1) - 0.5, minor=True)
        ax.set_yticks(np.arange(n + 1) - 0.5, minor=True)
        ax.grid(which="minor", color="white", linewidth=1)
        ax.tick_params(which="minor", length=0)
    ax.set_xlabel(f"tile of {tiles.tile[1]} keys")
    ax.set_ylabel(f"tile of {tiles.tile[0]} queries")
    counts = {kind: int((verdicts == kind).sum()) for kind in (EMPTY, PARTIAL, FULL)}
    patches = [
        Patch(facecolor=COLOURS[kind], label=f"{NAMES[kind]}: {count}")
        for kind, count in counts.items()
    ]
    ax.legend(handles=patches, loc="upper left", bbox_to_anchor=(1.02, 1), borderaxespad=0)
    return ax


def _verdicts_of(tiles: "TileMap", b: int, h: int) -> np.ndarray:
    if tiles.counts() is None:
        raise ValueError("TileMap.draw needs the map's values, and inside jit there are none yet.")
    if tiles.forward.tiles.ndim != 4:
        raise ValueError(
            "TileMap.draw draws one map, and this one was made under jax.vmap: pick one with "
            "jax.tree.map(lambda x: x[i], tiles)."
        )
    verdicts = np.asarray(tiles.verdicts())
    if 0 in verdicts.shape:
        raise ValueError(f"TileMap.draw: there are no tiles to draw: {tiles!r}.")
    picked = []
    for name, index, axis in (("b", b, 0), ("h", h, 1)):
        size = verdicts.shape[axis]
        if name not in tiles.depends:
            picked.append(0)  # one copy for all
        elif 0 <= index < size:
            picked.append(index)
        else:
            raise ValueError(f"TileMap.draw: {name} must be from 0 to {size - 1}, but is {index}.")
    return verdicts[tuple(picked)]
