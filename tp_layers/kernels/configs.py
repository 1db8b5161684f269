"""Tile configurations: plain data, one entry per (architecture, operation, shape class, dtype class).

What bounds a tile is checked ahead of time for every entry (`bench/aot.py`): 255 registers a thread, the shared
memory of a block (166,912 bytes on sm_80, 101,376 on sm_86, 232,448 on sm_90 and sm_100), and no spill.
None of the entries has been measured on a GPU yet.
"""

from typing import NamedTuple

import torch


class Tile(NamedTuple):
    """A GEMM program's output tile, its step along K, and how it is run."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    # Tiles along M that are walked before the next tile along N: they share the weight tiles that L2 holds.
    group_m: int = 8


class Row(NamedTuple):
    """A norm program's step along the row."""

    block_d: int
    num_warps: int


ARCHITECTURES = ("sm_80", "sm_86", "sm_90", "sm_100")
GEMMS = ("rowwise", "colwise", "gated")
NORMS = ("sum_of_squares", "scale")
SHAPE_CLASSES = ("few", "short", "long")
DTYPE_CLASSES = ("half", "float32")

# sm_87, sm_89 and sm_120 have sm_86's shared memory per block, sm_103 has sm_100's.
_FAMILY = {80: "sm_80", 86: "sm_86", 87: "sm_86", 89: "sm_86", 90: "sm_90", 100: "sm_100", 103: "sm_100", 120: "sm_86"}

# A modulation (1 to 8 rows) reads the weight once: narrow tiles, so that the weight's rows spread over all SMs.
_FEW = Tile(16, 32, 128, 4, 4)
# 512 text tokens: 64 rows a tile, or half the SMs have no tile.
_SHORT = Tile(64, 128, 64, 4, 4)
# ieee float32 has no tensor cores: operands and result live in registers. With 4 warps, or for the gated kernel with
# more than 16 a step, some architecture spills.
_FLOAT32 = {"rowwise": Tile(64, 64, 32, 8, 2), "colwise": Tile(64, 64, 32, 8, 2), "gated": Tile(64, 64, 16, 8, 3)}
_FEW_FLOAT32 = Tile(16, 32, 64, 4, 2)

_HALF: dict[tuple[str, str, str], Tile] = {
    ("sm_80", "rowwise", "few"): _FEW,
    ("sm_80", "rowwise", "short"): _SHORT,
    # Two loops over K in sequence spill at 64 a step, and not at 32 (254 registers).
    ("sm_80", "rowwise", "long"): Tile(128, 256, 32, 8, 4),
    ("sm_80", "colwise", "few"): _FEW,
    ("sm_80", "colwise", "short"): _SHORT,
    ("sm_80", "colwise", "long"): Tile(128, 256, 64, 8, 3),
    # Two accumulators and two weight tiles: spills at 128 columns, and at 64 with 4 warps.
    ("sm_80", "gated", "few"): _FEW,
    ("sm_80", "gated", "short"): Tile(64, 64, 64, 4, 3),
    ("sm_80", "gated", "long"): Tile(128, 64, 64, 8, 3),
    ("sm_86", "rowwise", "few"): _FEW,
    ("sm_86", "rowwise", "short"): _SHORT,
    ("sm_86", "rowwise", "long"): Tile(128, 128, 64, 8, 3),
    ("sm_86", "colwise", "few"): _FEW,
    ("sm_86", "colwise", "short"): _SHORT,
    ("sm_86", "colwise", "long"): Tile(128, 128, 64, 8, 3),
    ("sm_86", "gated", "few"): Tile(16, 32, 128, 4, 3),
    ("sm_86", "gated", "short"): Tile(64, 64, 64, 4, 3),
    ("sm_86", "gated", "long"): Tile(128, 64, 64, 8, 3),
    ("sm_90", "rowwise", "few"): _FEW,
    ("sm_90", "rowwise", "short"): _SHORT,
    ("sm_90", "rowwise", "long"): Tile(128, 256, 64, 8, 4),
    ("sm_90", "colwise", "few"): _FEW,
    ("sm_90", "colwise", "short"): _SHORT,
    ("sm_90", "colwise", "long"): Tile(128, 256, 64, 8, 4),
    ("sm_90", "gated", "few"): _FEW,
    ("sm_90", "gated", "short"): Tile(64, 64, 64, 4, 4),
    ("sm_90", "gated", "long"): Tile(128, 128, 64, 8, 4),
    ("sm_100", "rowwise", "few"): _FEW,
    ("sm_100", "rowwise", "short"): _SHORT,
    ("sm_100", "rowwise", "long"): Tile(128, 256, 64, 8, 4),
    ("sm_100", "colwise", "few"): _FEW,
    ("sm_100", "colwise", "short"): _SHORT,
    ("sm_100", "colwise", "long"): Tile(128, 256, 64, 8, 4),
    ("sm_100", "gated", "few"): _FEW,
    ("sm_100", "gated", "short"): Tile(64, 64, 64, 4, 4),
    ("sm_100", "gated", "long"): Tile(128, 128, 64, 8, 4),
}

TILES: dict[tuple[str, str, str, str], Tile] = {
    **{(*key, "half"): tile for key, tile in _HALF.items()},
    **{
        (architecture, operation, shape, "float32"): _FEW_FLOAT32 if shape == "few" else _FLOAT32[operation]
        for architecture in ARCHITECTURES
        for operation in GEMMS
        for shape in SHAPE_CLASSES
    },
}

# Tiles of the kernels that load through TMA: what such a launch uses instead, if its tensors take a descriptor.
# 196,640 to 229,408 of 232,448 bytes of shared memory. The gated one spills on sm_100.
TMA_TILES: dict[tuple[str, str, str, str], Tile] = {
    ("sm_90", "rowwise", "long", "half"): Tile(128, 256, 64, 8, 4),
    ("sm_90", "colwise", "long", "half"): Tile(128, 256, 64, 8, 4),
    ("sm_90", "gated", "long", "half"): Tile(128, 128, 64, 8, 4),
    ("sm_100", "rowwise", "long", "half"): Tile(128, 256, 64, 8, 4),
    ("sm_100", "colwise", "long", "half"): Tile(128, 256, 64, 8, 4),
}

# Where a result in float32 takes another one: at 256 columns it spills on sm_100.
WIDE_TMA_TILES: dict[tuple[str, str, str, str], Tile] = {
    ("sm_100", "rowwise", "long", "half"): Tile(128, 128, 64, 8, 4),
}

# A row of 1024 to 6144 channels, read once: 4 warps of 8 elements a thread keep 16-byte loads in flight.
ROWS: dict[str, Row] = dict.fromkeys(NORMS, Row(1024, 4))

# Under the interpreter every step of every tile costs milliseconds, whatever its size. Three different extents, so
# that a mix-up of two of them shows.
INTERPRETED = Tile(32, 64, 32, 4, 1, group_m=2)
INTERPRETED_ROW = Row(64, 1)


def architecture_of(major: int, minor: int) -> str:
    """The architecture whose entries a device of this compute capability uses; the nearest older one if unlisted."""
    number = 10 * major + minor
    return _FAMILY[max((known for known in _FAMILY if known <= number), default=80)]


def shape_class(rows: int) -> str:
    """ "few" (a modulation), "short" (text tokens) or "long"."""
    return "few" if rows <= 16 else "short" if rows <= 512 else "long"


def dtype_class(dtype: torch.dtype) -> str:
    """ "float32", or "half" for bfloat16 and float16."""
    return "float32" if dtype == torch.float32 else "half"


def tile_for(architecture: str | None, operation: str, rows: int, dtype: torch.dtype) -> Tile:
    """The entry for a GEMM over `rows` rows; None stands for the interpreter."""
    if architecture is None:
        return INTERPRETED
    return TILES[architecture, operation, shape_class(rows), dtype_class(dtype)]


def tma_tile_for(
    architecture: str | None, operation: str, rows: int, dtype: torch.dtype, result: torch.dtype | None = None
) -> Tile | None:
    """The entry of `TMA_TILES`, if there is one, for operands in `dtype`."""
    key = architecture or "", operation, shape_class(rows), dtype_class(dtype)
    return WIDE_TMA_TILES.get(key) if result == torch.float32 and key in WIDE_TMA_TILES else TMA_TILES.get(key)


def row_for(architecture: str | None, operation: str) -> Row:
    """The entry for a norm; None stands for the interpreter."""
    return INTERPRETED_ROW if architecture is None else ROWS[operation]
