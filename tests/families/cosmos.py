"""Cosmos 1.0, Cosmos Predict2.5 and Transfer2.5; Cosmos 3, with either of its two kinds of layers."""

import torch

from .family import Family, Values, noise, positions


def cosmos(heads: int) -> Values:
    return dict(
        in_channels=6, out_channels=4, num_attention_heads=heads, attention_head_dim=12, num_layers=2, mlp_ratio=2.0,
        text_embed_dim=24, adaln_lora_dim=10, max_size=(8, 16, 16), concat_padding_mask=False,
    )  # fmt: skip


def cosmos25(heads: int) -> Values:
    return cosmos(heads) | dict(
        in_channels=7, extra_pos_embed_type=None, use_crossattn_projection=True, crossattn_proj_in_channels=28,
        encoder_hidden_states_channels=24,
    )  # fmt: skip


def transfer(heads: int) -> Values:
    return cosmos25(heads) | dict(img_context_dim_in=20, img_context_dim_out=heads * 12, controlnet_block_every_n=1)


def cosmos_inputs() -> Values:
    return dict(
        hidden_states=noise(2, 6, 2, 4, 6), timestep=torch.tensor([300, 700]), fps=24,
        encoder_hidden_states=noise(2, 5, 24, seed=2),
        attention_mask=torch.tensor([[True] * 5, [True] * 3 + [False] * 2]),
    )  # fmt: skip


def cosmos25_inputs() -> Values:
    # A time for each frame, of which the first is given, as the mask says.
    times = torch.tensor([0.0, 700.0]).view(1, 1, 2, 1, 1).repeat(2, 1, 1, 1, 1)
    return dict(
        hidden_states=noise(2, 6, 2, 4, 6), condition_mask=(times == 0).float().repeat(1, 1, 1, 4, 6), timestep=times,
        encoder_hidden_states=noise(2, 5, 28, seed=2), fps=24,
    )  # fmt: skip


def transfer_inputs() -> Values:
    both = (noise(2, 5, 28, seed=2), noise(2, 3, 20, seed=3))
    controls = [noise(2, 12, 48, seed=4), noise(2, 12, 48, seed=5)]
    return cosmos25_inputs() | dict(encoder_hidden_states=both, block_controlnet_hidden_states=controls)


def cosmos3(heads: int) -> Values:
    # Two heads of queries for each of keys and values.
    return dict(
        head_dim=8, hidden_size=20, intermediate_size=heads * 10, latent_channel=3, patch_latent_dim=12,
        vocab_size=heads * 11, num_attention_heads=heads * 2, num_key_value_heads=heads, num_hidden_layers=2,
        rope_axes_dim=(2, 1, 1), action_gen=True, action_dim=7, num_embodiment_domains=3, sound_gen=True, sound_dim=5,
        attention_bias=True,
    )  # fmt: skip


def edge(heads: int) -> Values:
    return cosmos3(heads) | dict(hidden_act="relu2", qk_norm_for_text=False, use_und_k_norm_for_gen=True)


def cosmos3_inputs() -> Values:
    # Fifteen tokens: four of text, two frames of 1 x 3 patches, three of sound, two of action.
    text, vision, sound, action = torch.arange(15).split([4, 6, 3, 2])
    return dict(
        input_ids=torch.tensor([1, 5, 9, 30]), text_indexes=text, position_ids=positions(15, 3).T, und_len=4,
        sequence_length=15, vision_tokens=[noise(1, 3, 2, 2, 6)], vision_token_shapes=[(2, 1, 3)],
        vision_sequence_indexes=vision, vision_mse_loss_indexes=vision[3:], vision_timesteps=torch.tensor([700.0] * 3),
        vision_noisy_frame_indexes=[torch.tensor([1])], sound_tokens=[noise(5, 3, seed=2)],
        sound_token_shapes=[(3, 1, 1)], sound_sequence_indexes=sound, sound_mse_loss_indexes=sound,
        sound_timesteps=torch.tensor([300.0] * 3), sound_noisy_frame_indexes=[torch.arange(3)],
        action_tokens=[noise(2, 7, seed=3)], action_token_shapes=[(2, 1, 1)], action_sequence_indexes=action,
        action_mse_loss_indexes=action, action_timesteps=torch.tensor([500.0] * 2),
        action_noisy_frame_indexes=[torch.arange(2)], action_domain_ids=[torch.tensor(2)],
    )  # fmt: skip


# What the last layer makes of the text, but for keys and values, is for a language model.
TEXT_ENDS = r"lm_head|layers\.1\.(self_attn\.to_(q|out)\.|mlp\.)"

FAMILIES = [
    Family("CosmosTransformer3DModel", cosmos, cosmos_inputs, "1.0"),
    Family("CosmosTransformer3DModel", cosmos25, cosmos25_inputs, "Predict2.5"),
    Family("CosmosTransformer3DModel", transfer, transfer_inputs, "Transfer2.5"),
    Family("Cosmos3OmniTransformer", cosmos3, cosmos3_inputs, "Nano", dead=TEXT_ENDS),
    Family("Cosmos3OmniTransformer", edge, cosmos3_inputs, "Edge", dead=TEXT_ENDS),
]
