"""Tensors that are the same for the same seed: small integers, whose sums are exact, and normal noise."""

import torch


def integers(*shape: int, seed: int = 0, most: int = 8, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Integers from -most to most; of the default ones no dtype rounds the sum of a few."""
    return torch.randint(-most, most + 1, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def per_rank(shape: tuple[int, ...], size: int, seed: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """The integers that each rank puts in, in rank order."""
    return [integers(*shape, seed=100 * seed + rank, dtype=dtype) for rank in range(size)]


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Standard normal numbers, rounded from float64."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
