"""Which norms of queries and keys a resolved plan reduces together (see `layers/pair.py`)."""

from collections.abc import Mapping

from .norm_styles import RMSNorm
from .shared import FUSED
from .style import Style


def norm_pairs(styles: Mapping[str, Style], size: int) -> list[str]:
    """The attention modules with `norm_q` and `norm_k` across ranks, each of a split projection of its own."""
    if size == 1:
        return []
    found = []
    for path in (path.removesuffix(".norm_q") for path in styles if path.endswith(".norm_q")):
        norms = [styles.get(f"{path}.{name}") for name in ("norm_q", "norm_k")]
        projections = [styles.get(f"{path}.{name}") for name in ("to_q", "to_k")]
        fused = any(f"{path}.{name}" in styles for name in FUSED)
        split = all(style is not None and style.output == "split" for style in projections)
        if split and not fused and all(type(style) is RMSNorm for style in norms):
            found.append(path)
    return found
