"""A model whose parameters are large beside everything else."""

from torch import nn

BIG_PLAN = {"up": "colwise", "down": "rowwise", "up_again": "colwise", "down_again": "rowwise"}


class Big(nn.Module):
    """Four planned weights of 64 kB and next to nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)
        self.up_again, self.down_again = nn.Linear(64, 256), nn.Linear(256, 64)
