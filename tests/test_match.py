"""A plan's keys and the modules they name: any number of stars, over lists and dicts, with optional modules missing."""

import pytest
from torch import nn

from refused import refused
from tp_layers import apply
from tp_layers.group import Group
from tp_layers.plans.match import match


class Pair(nn.Module):
    def __init__(self, optional="present"):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
        if optional in ("present", "emptied"):
            self.extra = nn.Linear(8, 8)
        if optional in ("none", "emptied"):
            self.extra = None


class Streams(nn.Module):
    """A ModuleDict of ModuleLists, a list of its own, and a Sequential within a block."""

    def __init__(self):
        super().__init__()
        self.modes = nn.ModuleDict({name: nn.ModuleList([Pair(), Pair()]) for name in ("image", "text")})
        self.blocks = nn.ModuleList(Pair(optional) for optional in ("present", "none", "emptied", "absent"))
        self.tail = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        self.table = nn.Parameter(nn.Linear(8, 8).weight.detach())


STREAMS = ["image.0", "image.1", "text.0", "text.1"]
NAMED = {
    "no_star": ("tail.0", ["tail.0"]),
    "an_exact_block": ("blocks.1.up", ["blocks.1.up"]),
    "one_star_over_a_list": ("blocks.*.up", [f"blocks.{index}.up" for index in range(4)]),
    "one_star_over_a_dict": ("modes.*.1.up", ["modes.image.1.up", "modes.text.1.up"]),
    "two_stars": ("modes.*.*.up", [f"modes.{name}.up" for name in STREAMS]),
    "three_stars": ("*.*.*.up", [f"modes.{name}.up" for name in STREAMS]),
    "a_star_for_the_module_itself": ("modes.image.0.*", [f"modes.image.0.{name}" for name in ("up", "down", "extra")]),
    "a_star_over_a_sequential": ("tail.*", ["tail.0", "tail.1", "tail.2"]),
    "a_module_that_is_none_or_absent_in_some_blocks": ("blocks.*.extra", ["blocks.0.extra"]),
    "a_bare_parameter": ("table", ["table"]),
    "a_parameter_of_a_module": ("blocks.*.up.bias", [f"blocks.{index}.up.bias" for index in range(4)]),
}


@pytest.mark.parametrize(("key", "paths"), NAMED.values(), ids=NAMED)
def test_a_key_names_exactly_these_paths(key, paths):
    model = Streams()
    found = match(model, {key: "colwise"})
    assert [item.path for item in found] == paths
    named = dict(model.named_modules()) | dict(model.named_parameters())
    assert all(item.target is named[item.path] and item.key == key for item in found)


def test_a_star_is_one_whole_component_and_no_part_of_a_name():
    with pytest.raises(ValueError, match=r"'blocks\.\*\.u\*' matches nothing"):
        match(Streams(), {"blocks.*.u*": "colwise"})
    with pytest.raises(ValueError, match=r"'\*\.up' matches nothing"):
        match(Streams(), {"*.up": "colwise"})


BLOCKS = {
    "no_star_is_the_model": ("tail.0", [""]),
    "one_star": ("blocks.*.up", [f"blocks.{index}" for index in range(4)]),
    "the_last_of_two_stars": ("modes.*.*.up", [f"modes.{name}" for name in STREAMS]),
    "a_star_for_the_module_itself_is_what_holds_the_list": ("modes.*.0.*", ["modes.image", "modes.text"]),
    "a_list_of_the_model_itself": ("tail.*", [""]),
}


@pytest.mark.parametrize(("key", "blocks"), BLOCKS.values(), ids=BLOCKS)
def test_the_block_of_a_match(key, blocks):
    found = [item.block for item in match(Streams(), {key: "colwise"})]
    assert list(dict.fromkeys(found)) == blocks


def test_the_matches_come_in_the_order_of_the_plan():
    plan = {"tail.2": "rowwise", "blocks.*.down": "rowwise", "tail.0": "colwise"}
    assert [item.path for item in match(Streams(), plan)] == [
        "tail.2", *(f"blocks.{index}.down" for index in range(4)), "tail.0"
    ]  # fmt: skip


WRONG = {
    "a_typo": (
        {"blocks.*.upp": "colwise"},
        ["the plan key 'blocks.*.upp' matches nothing in Streams", "the nearest path is 'blocks.*.up'"],
    ),
    "a_typo_under_two_stars": (
        {"modes.*.*.dwn": "colwise"},
        ["'modes.*.*.dwn' matches nothing in Streams", "the nearest path is 'modes.text.*.down'"],
    ),
    "one_right_key_does_not_hide_a_wrong_one": (
        {"blocks.*.up": "colwise", "blocks.*.down": "rowwise", "blocks.*.third": "rowwise"},
        ["'blocks.*.third' matches nothing in Streams"],
    ),
    "past_the_last_block": ({"blocks.4.up": "colwise"}, ["'blocks.4.up' matches nothing"]),
    "below_a_layer": ({"tail.0.up": "colwise"}, ["'tail.0.up' matches nothing"]),
    "no_bias": ({"tail.1.bias": "colwise"}, ["'tail.1.bias' matches nothing"]),
    "nothing_alike": ({"zzzzzz": "colwise"}, ["'zzzzzz' matches nothing in Streams"]),
    "an_empty_plan": ({}, ["the plan for Streams is empty"]),
    "a_star_and_an_exact_key": (
        {"blocks.*.up": "colwise", "blocks.*.down": "rowwise", "blocks.1.up": "colwise"},
        ["the plan keys 'blocks.*.up' and 'blocks.1.up' both name 'blocks.1.up'"],
    ),
    "two_star_keys": (
        {"modes.*.0.up": "colwise", "modes.text.*.up": "colwise"},
        ["the plan keys 'modes.*.0.up' and 'modes.text.*.up' both name 'modes.text.0.up'"],
    ),
    "two_star_keys_of_unlike_depth": (
        {"*.0.up": "colwise", "blocks.0.*": "colwise"},
        ["the plan keys '*.0.up' and 'blocks.0.*' both name 'blocks.0.up'"],
    ),
}


@pytest.mark.parametrize(("plan", "message"), WRONG.values(), ids=WRONG)
def test_a_plan_that_names_wrong_is_refused(plan, message):
    model = Streams()
    with refused(model, *message):
        apply(model, plan, group=Group(0, 2))


def test_one_module_at_two_paths_is_refused():
    """Each of the paths would shard it once more."""
    model = Streams()
    model.blocks[1].extra = model.blocks[0].extra
    with refused(model, "'blocks.0.extra' and 'blocks.1.extra' are one and the same"):
        apply(model, {"blocks.*.extra": "colwise", "blocks.*.down": "rowwise"}, group=Group(0, 2))


def test_a_second_name_within_one_parent_is_refused_as_well():
    model = Streams()
    model.blocks[0].again = model.blocks[0].up
    with refused(model, "'blocks.0.up' and 'blocks.0.again' are one and the same"):
        apply(model, {"blocks.0.up": "colwise", "blocks.0.again": "colwise"}, group=Group(0, 2))
