"""LoRA files in formats other than PEFT's, each with what it must add to the weights of diffusers' model.

An original layer may stand for several of diffusers' (q, k and v): its matrix B has the rows of all of them.
"""

from collections.abc import Callable, Iterable

import torch
from torch import nn

from families import REGISTERED
from seeded import noise

State = dict[str, torch.Tensor]
# By the layer: what is added to its weight, and to its bias.
Wanted = dict[str, torch.Tensor]
Layers = dict[str, list[str]]

FLUX_DOUBLE = {
    "img_attn.qkv": ["attn.to_q", "attn.to_k", "attn.to_v"],
    "txt_attn.qkv": ["attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"],
    "img_attn.proj": ["attn.to_out.0"],
    "txt_attn.proj": ["attn.to_add_out"],
}
FLUX_BLOCKS = FLUX_DOUBLE | {
    "img_mlp.0": ["ff.net.0.proj"],
    "img_mlp.2": ["ff.net.2"],
    "txt_mlp.0": ["ff_context.net.0.proj"],
    "txt_mlp.2": ["ff_context.net.2"],
    "img_mod.lin": ["norm1.linear"],
    "txt_mod.lin": ["norm1_context.linear"],
}
FLUX2_BLOCKS = FLUX_DOUBLE | {
    "img_mlp.0": ["ff.linear_in"],
    "img_mlp.2": ["ff.linear_out"],
    "txt_mlp.0": ["ff_context.linear_in"],
    "txt_mlp.2": ["ff_context.linear_out"],
}
WAN_ATTENTION = {"q": "to_q", "k": "to_k", "v": "to_v", "o": "to_out.0"}
WAN_BLOCKS = {
    **{f"self_attn.{old}": [f"attn1.{new}"] for old, new in WAN_ATTENTION.items()},
    **{f"cross_attn.{old}": [f"attn2.{new}"] for old, new in WAN_ATTENTION.items()},
    "ffn.0": ["ffn.net.0.proj"],
    "ffn.2": ["ffn.net.2"],
}


def _in(old: str, new: str, layers: Layers) -> Layers:
    return {f"{old}.{name}": [f"{new}.{path}" for path in paths] for name, paths in layers.items()}


FLUX = _in("double_blocks.0", "transformer_blocks.0", FLUX_BLOCKS) | {
    # The converters know the widths of a single block's linear1 for the published sizes alone.
    "single_blocks.1.linear2": ["single_transformer_blocks.1.proj_out"],
    "single_blocks.1.modulation.lin": ["single_transformer_blocks.1.norm.linear"],
}
FLUX2 = _in("double_blocks.0", "transformer_blocks.0", FLUX2_BLOCKS) | {
    "single_blocks.1.linear1": ["single_transformer_blocks.1.attn.to_qkv_mlp_proj"],
    "single_blocks.1.linear2": ["single_transformer_blocks.1.attn.to_out"],
}
FLUX2_TOP = {
    "img_in": ["x_embedder"],
    "txt_in": ["context_embedder"],
    "time_in.in_layer": ["time_guidance_embed.timestep_embedder.linear_1"],
    "double_stream_modulation_img.lin": ["double_stream_modulation_img.linear"],
    "final_layer.linear": ["proj_out"],
}
WAN = _in("blocks.0", "blocks.0", WAN_BLOCKS) | _in("blocks.1", "blocks.1", WAN_BLOCKS)


def _made(
    model: nn.Module, layers: Layers, key: Callable[[str], str], sides: tuple[str, str], alphas: Iterable[float] = ()
) -> tuple[State, Wanted]:
    """The state of a file with `key(original layer)` before the side, and `alphas` in turn (none: no alpha)."""
    state, wanted, of = {}, {}, list(alphas)
    for number, (name, paths) in enumerate(layers.items()):
        modules = [model.get_submodule(path) for path in paths]
        widths = [module.weight.shape[0] for module in modules]
        # A rank that three do not divide, so that no converter takes the matrices apart.
        down, up = noise(4, modules[0].weight.shape[1], seed=2 * number), noise(sum(widths), 4, seed=2 * number + 1)
        state[f"{key(name)}.{sides[0]}.weight"], state[f"{key(name)}.{sides[1]}.weight"] = down, up
        factor = 1.0
        if of:
            state[f"{key(name)}.alpha"] = torch.tensor(of[number % len(of)])
            factor = of[number % len(of)] / 4
        for path, rows in zip(paths, up.split(widths), strict=True):
            wanted[path] = factor * rows.double() @ down.double()
    return state, wanted


def kohya(model: nn.Module, layers: Layers) -> tuple[State, Wanted]:
    """Names with underscores, and an alpha for each layer."""
    return _made(
        model, layers, lambda it: "lora_unet_" + it.replace(".", "_"), ("lora_down", "lora_up"), [1.0, 6.0, 4.0]
    )


def prefixed(model: nn.Module, layers: Layers, prefix: str = "diffusion_model.") -> tuple[State, Wanted]:
    """The original names behind a prefix, PEFT's sides."""
    return _made(model, layers, lambda it: prefix + it, ("lora_A", "lora_B"))


def xlabs(model: nn.Module) -> tuple[State, Wanted]:
    """Of FLUX.1's double blocks: the attention alone, by numbers of the streams."""
    names = {
        "qkv_lora1": "img_attn.qkv", "qkv_lora2": "txt_attn.qkv", "proj_lora1": "img_attn.proj",
        "proj_lora2": "txt_attn.proj",
    }  # fmt: skip
    layers = {f"double_blocks.0.processor.{name}": FLUX[f"double_blocks.0.{old}"] for name, old in names.items()}
    return _made(model, layers, lambda it: it, ("down", "up"))


def with_biases(model: nn.Module) -> tuple[State, Wanted]:
    """Wan's original names, with differences of biases."""
    state, wanted = prefixed(model, WAN)
    for number, (name, (path,)) in enumerate(WAN.items()):
        difference = noise(model.get_submodule(path).weight.shape[0], seed=1000 + number)
        state[f"diffusion_model.{name}.diff_b"], wanted[f"{path}.bias"] = difference, difference.double()
    return state, wanted


def sparse(model: nn.Module) -> tuple[State, Wanted]:
    """Three adapters of rank 2 in one: a qkv whose B is zero outside of each projection's own columns."""
    (paths,) = [FLUX["double_blocks.0.img_attn.qkv"]]
    width = model.get_submodule(paths[0]).weight.shape
    downs, ups = [noise(2, width[1], seed=i) for i in range(3)], [noise(width[0], 2, seed=9 + i) for i in range(3)]
    state = {"lora_down.weight": torch.cat(downs), "lora_up.weight": torch.block_diag(*ups), "alpha": torch.tensor(3.0)}
    wanted = {path: 0.5 * up.double() @ down.double() for path, up, down in zip(paths, ups, downs, strict=True)}
    return {f"lora_unet_double_blocks_0_img_attn_qkv.{key}": it for key, it in state.items()}, wanted


def old_names(model: nn.Module) -> tuple[State, Wanted]:
    """diffusers' own names from before it used PEFT's."""
    path = "transformer_blocks.0.attn.to_q"
    return _made(model, {path: [path]}, lambda it: f"transformer.{it}", ("lora.down", "lora.up"))


def qwen_kohya(model: nn.Module) -> tuple[State, Wanted]:
    """Qwen-Image's own names, with underscores."""
    ends = ("attn.to_q", "attn.to_out.0", "attn.add_k_proj", "img_mlp.net.0.proj", "img_mlp.net.2", "img_mod.1")
    return kohya(model, {path: [path] for path in (f"transformer_blocks.1.{end}" for end in ends)})


FORMATS: dict[str, tuple[str, Callable[[nn.Module], tuple[State, Wanted]]]] = {
    "flux_kohya": ("FluxTransformer2DModel", lambda model: kohya(model, FLUX)),
    "flux_kohya_sparse": ("FluxTransformer2DModel", sparse),
    "flux_xlabs": ("FluxTransformer2DModel", xlabs),
    "flux_old_names": ("FluxTransformer2DModel", old_names),
    "flux2_bfl": ("Flux2Transformer2DModel", lambda model: prefixed(model, FLUX2 | FLUX2_TOP)),
    "flux2_bfl_by_peft": ("Flux2Transformer2DModel", lambda model: prefixed(model, FLUX2, "base_model.model.")),
    "flux2_kohya": ("Flux2Transformer2DModel", lambda model: kohya(model, FLUX2)),
    "wan": ("WanTransformer3DModel, text to video", lambda model: prefixed(model, WAN)),
    "wan_biases": ("WanTransformer3DModel, text to video", with_biases),
    "wan_kohya": ("WanTransformer3DModel, text to video", lambda model: kohya(model, WAN)),
    "qwenimage_kohya": ("QwenImageTransformer2DModel", qwen_kohya),
}


def made(name: str) -> tuple[nn.Module, State, Wanted]:
    """The tiny model of a format, its file's state, and what it adds."""
    label, make = FORMATS[name]
    model = REGISTERED[label].build()
    return model, *make(model)
