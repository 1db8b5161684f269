"""Split tensors in a plan: each must come from somewhere and be taken up by someone, within its block."""

from .match import Match


def open_ends(matches: list[Match]) -> list[str]:
    """Split outputs that no planned module of their block takes, and split inputs that none gives; in words."""
    givers = [item.path for item in matches if item.style.output == "split" and item.style.input != "split"]
    takers = [item.path for item in matches if item.takes]
    notes = []
    for item in matches:
        said = f"plan key '{item.key}'"
        where = f"no module in '{item.block}'" if item.block else "no module in the model"
        if item.path in givers and not _within(item.block, takers):
            notes.append(f"{said}: the output of '{item.path}' is split, and {where} takes a split input")
        if item.style.input == "split" and not _within(item.block, givers):
            notes.append(f"{said}: the input of '{item.path}' must be split, and {where} gives a split output")
    return notes


def _within(block: str, paths: list[str]) -> bool:
    return any(not block or path == block or path.startswith(f"{block}.") for path in paths)
