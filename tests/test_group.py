"""Group: rank and size are the group's own, whatever the ranks of the world, and who does not belong is refused."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from close import FLOAT32, relative_error
from tp_layers.group import Group
from tp_layers.layers.linear import ColwiseLinear, RowwiseLinear


def pair(group):
    """A sharded colwise -> GELU -> rowwise pair over `group`, and the unsharded one with the same weights."""
    torch.manual_seed(0)
    up, down = nn.Linear(7, 12), nn.Linear(12, 5)
    sharded = nn.Sequential(
        ColwiseLinear.from_linear(up, group=group), nn.GELU(), RowwiseLinear.from_linear(down, group=group)
    )
    return sharded, nn.Sequential(up, nn.GELU(), down)


def pair_error(group, seed):
    """How far the pair is from the unsharded one; ranks of one group must be given one seed."""
    sharded, full = pair(group)
    x = torch.randn(3, 7, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        return relative_error(sharded(x), full(x))


def refusal(group):
    try:
        Group.of(group)
    except ValueError as error:
        return str(error)
    return "accepted"


def test_without_a_process_group_none_is_one_rank():
    group = Group.of(None)
    assert (group.rank, group.size, group.process_group) == (0, 1, None)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    assert group.device.type == (accelerator.type if accelerator else "cpu")
    assert pair_error(Group(), 0) == 0


def test_a_group_is_itself():
    group = Group(2, 3)
    assert Group.of(group) is group


def none_and_process_group(group):
    default, same = Group.of(None), Group.of(group.process_group)
    return (
        (default.rank, default.size, default.device.type, default.process_group is dist.group.WORLD),
        (same.rank, same.size, same.device.type, same.process_group is group.process_group),
        dist.get_rank(),
    )


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_none_is_the_world_and_a_process_group_is_its_members(ranks, size):
    for rank, (default, same, world_rank) in enumerate(ranks(size, none_and_process_group)):
        assert default == (world_rank, 4, "cpu", True)
        assert same == (rank, size, "cpu", True)


def one_axis(group):
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    found = Group.of(mesh)
    return found.rank, found.size, found.process_group is mesh.get_group(), pair_error(mesh, 3)


def test_a_mesh_of_one_axis_is_its_process_group(ranks):
    for rank, (*found, error) in enumerate(ranks(4, one_axis)):
        assert found == [rank, 4, True]
        assert error <= FLOAT32


def two_axes(group):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    place = mesh.get_coordinate()
    found = {}
    for axis, name in enumerate(mesh.mesh_dim_names):
        over = Group.of(mesh[name])
        # The two groups of an axis see different inputs: a collective over the wrong ranks mixes them.
        found[name] = (over.rank == place[axis], over.size, pair_error(mesh[name], seed=place[1 - axis]))
    return refusal(mesh), found


def test_either_axis_of_a_two_by_two_mesh_is_a_group_of_its_own(ranks):
    for message, found in ranks(4, two_axes):
        assert "one axis of a mesh, got the 2 axes ('dp', 'tp')" in message and "mesh['tp']" in message
        for right_rank, size, error in found.values():
            assert right_rank and size == 2
            assert error <= FLOAT32


def odd_ranks(group):
    some = dist.new_group([1, 3])
    if group.rank % 2 == 0:
        return refusal(some)
    found = Group.of(some)
    return found.rank, found.size, pair_error(some, 5), refusal(group.process_group)


def test_a_group_within_the_world_counts_its_own_ranks(ranks):
    zero, one, two, three = ranks(4, odd_ranks)
    assert "not a member of the given group" in zero and zero == two
    for rank, (*found, error, world) in enumerate((one, three)):
        assert found == [rank, 2]
        assert error <= FLOAT32
        assert world == "accepted"


def mesh_of_odd_ranks(group):
    mesh = DeviceMesh("cpu", [1, 3])
    return refusal(mesh) if group.rank % 2 == 0 else (Group.of(mesh).rank, Group.of(mesh).size)


def test_a_mesh_refuses_a_rank_it_does_not_hold(ranks):
    zero, one, two, three = ranks(4, mesh_of_odd_ranks)
    assert "not a member of the given group" in zero and zero == two
    assert (one, three) == ((0, 2), (1, 2))


def two_models(group):
    """A pair over all four ranks and one over two of them, in one process, used in turn."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    half = halves[group.rank // 2]
    (wide, full), (narrow, _) = pair(group), pair(half)
    x = torch.randn(3, 7, generator=torch.Generator().manual_seed(0))
    y = torch.randn(3, 7, generator=torch.Generator().manual_seed(1 + group.rank // 2))
    with torch.no_grad():
        return [
            relative_error(model(value), full(value))
            for model, value in ((wide, x), (narrow, y), (wide, x), (narrow, y))
        ]


def test_two_models_over_two_groups_in_one_process(ranks):
    assert all(error <= FLOAT32 for errors in ranks(4, two_models) for error in errors)


def copied(group):
    sharded, full = pair(group)
    twin = copy.deepcopy(sharded)
    x = torch.randn(3, 7, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        error = relative_error(twin(x), full(x))
        own_weights = twin[0].weight.data_ptr() != sharded[0].weight.data_ptr()
    return twin[0].group is twin[2].group is sharded[0].group, own_weights, error


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_copied_layer_keeps_the_group(ranks, size):
    for same_group, own_weights, error in ranks(size, copied):
        assert same_group and own_weights
        assert error <= FLOAT32
