"""The tensors of a checkpoint that are the model's own."""

from pathlib import Path

import pytest

from entries import entries_of
from toy import Toy
from tp_layers.loader.build import build
from tp_layers.loader.index import Entry
from tp_layers.loader.keys import check_keys


def test_keys_come_in_the_order_of_the_files():
    model = build(Toy, {})
    made = entries_of(model)
    order = list(made)
    made = {name: made[name] for name in reversed(order)}
    assert list(check_keys(model, made)) == order
    elsewhere = made[order[0]]
    made[order[0]] = Entry(Path("y"), elsewhere.dtype, elsewhere.shape, 0)
    assert list(check_keys(model, made)) == [*order[1:], order[0]]


@pytest.mark.parametrize("kept", ["embed.weight", "head.weight"])
def test_one_entry_of_tied_parameters_is_enough(kept):
    model = build(Toy, {})
    made = entries_of(model)
    made[kept] = made.pop("embed.weight")
    assert set(check_keys(model, made)) == set(made)
    del made[kept]
    with pytest.raises(ValueError, match=r"the checkpoint lacks \['embed\.weight'\], which Toy needs"):
        check_keys(model, made)
