"""OmniGen."""

import torch

from .family import Family, Values, noise


def omnigen(heads: int) -> Values:
    return dict(
        in_channels=3, patch_size=2, hidden_size=heads * 16, num_attention_heads=heads, num_key_value_heads=heads,
        intermediate_size=heads * 10, num_layers=2, vocab_size=23, pad_token_id=0, max_position_embeddings=64,
        original_max_position_embeddings=32, rope_scaling={"short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
        pos_embed_max_size=8, time_step_dim=20,
    )  # fmt: skip


def omnigen_inputs() -> Values:
    # Each sample: seven words, of which two stand for the patches of an image; the time; six patches of the output.
    mask = torch.ones(2, 14, 14).tril()
    mask[:, 8:, 8:] = 1.0
    mask[1, :, 0] = 0.0
    mask[1, 0, 0] = 1.0
    return dict(
        hidden_states=noise(2, 3, 4, 6), timestep=torch.tensor([0.25, 0.5]),
        input_ids=torch.arange(14).reshape(2, 7) + 1, input_img_latents=[noise(1, 3, 2, 4), noise(1, 3, 4, 2, seed=2)],
        input_image_sizes={0: [[2, 4]], 1: [[3, 5]]}, attention_mask=mask,
        position_ids=torch.arange(14).expand(2, 14).clone(),
    )  # fmt: skip


FAMILIES = [Family("OmniGenTransformer2DModel", omnigen, omnigen_inputs)]
