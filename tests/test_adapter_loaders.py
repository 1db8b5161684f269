"""The table of diffusers' loaders, by which adapters' keys are converted, is what diffusers has."""

import inspect
import re

import diffusers
import pytest
from diffusers.loaders import lora_pipeline

from tp_layers.loader.adapter_classes import LOADERS
from tp_layers.plans.families import PLANS

MIXINS = {name: it for name, it in vars(lora_pipeline).items() if re.fullmatch(r"\w+LoraLoaderMixin", name)}


def test_every_class_and_loader_of_the_table_is_there():
    for name, loader in LOADERS.items():
        assert hasattr(diffusers, name) and hasattr(MIXINS[f"{loader}LoraLoaderMixin"], "lora_state_dict")


@pytest.mark.slow
def test_every_planned_class_of_a_pipeline_that_loads_lora_is_in_the_table():
    found = {}
    for name in (name for name in dir(diffusers) if name.endswith("Pipeline")):
        pipeline = getattr(diffusers, name)
        mixins = [base.__name__ for base in getattr(pipeline, "__mro__", ()) if base.__name__ in MIXINS]
        for parameter in inspect.signature(pipeline.__init__).parameters.values() if mixins else ():
            classes = re.findall(r"\w+", str(parameter.annotation)) if "transformer" in parameter.name else ()
            found |= {it: mixins[0].removesuffix("LoraLoaderMixin") for it in classes if it in PLANS}
    # Its converter is for UNets.
    found = {name: loader for name, loader in found.items() if loader != "StableDiffusion"}
    assert len(found) > 25
    assert {name: LOADERS.get(name) for name in found} == found
