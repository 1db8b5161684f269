"""Which of diffusers' loaders converts the adapters of a model's class: that of the pipelines which have the class."""

from torch import nn

# Each is the beginning of a `...LoraLoaderMixin`. Pipelines of one class share theirs.
LOADERS = {
    "AceStepTransformer1DModel": "AceStep",
    "AnyFlowFARTransformer3DModel": "Wan",
    "AnyFlowTransformer3DModel": "Wan",
    "AuraFlowTransformer2DModel": "AuraFlow",
    "BriaFibo2Transformer2DModel": "BriaFibo2",
    "BriaFiboTransformer2DModel": "Flux",
    "ChromaTransformer2DModel": "Flux",
    "ChronoEditTransformer3DModel": "Wan",
    "CogVideoXTransformer3DModel": "CogVideoX",
    "CogView4Transformer2DModel": "CogView4",
    "ConsisIDTransformer3DModel": "CogVideoX",
    "CosmosTransformer3DModel": "Cosmos",
    "ErnieImageTransformer2DModel": "ErnieImage",
    "Flux2Transformer2DModel": "Flux2",
    "Flux3Transformer2DModel": "Flux3",
    "FluxTransformer2DModel": "Flux",
    "HeliosTransformer3DModel": "Helios",
    "HiDreamImageTransformer2DModel": "HiDreamImage",
    "HunyuanVideoFramepackTransformer3DModel": "HunyuanVideo",
    "HunyuanVideoTransformer3DModel": "HunyuanVideo",
    "Ideogram4Transformer2DModel": "Ideogram4",
    "Kandinsky5Transformer3DModel": "Kandinsky",
    "Krea2Transformer2DModel": "Krea2",
    "LTX2VideoTransformer3DModel": "LTX2",
    "LTXVideoTransformer3DModel": "LTXVideo",
    "Lumina2Transformer2DModel": "Lumina2",
    "MiniMaxH3Transformer3DModel": "MiniMaxH3",
    "MochiTransformer3DModel": "Mochi1",
    "QwenImage21Transformer2DModel": "QwenImage",
    "QwenImageTransformer2DModel": "QwenImage",
    "SD3Transformer2DModel": "SD3",
    "SanaTransformer2DModel": "Sana",
    "SanaVideoTransformer3DModel": "Sana",
    "SkyReelsV2Transformer3DModel": "SkyReelsV2",
    "WanAnimateTransformer3DModel": "Wan",
    "WanTransformer3DModel": "Wan",
    "WanVACETransformer3DModel": "Wan",
    "ZImageTransformer2DModel": "ZImage",
}


def loader_of(model: nn.Module) -> str | None:
    """The name of diffusers' loader for the model's class."""
    names = [LOADERS[base.__name__] for base in type(model).__mro__ if base.__name__ in LOADERS]
    return f"{names[0]}LoraLoaderMixin" if names else None
