"""Which part of the records a rank needs, against the ranks that Megatron itself builds.

Groups are of torch's fake backend: real groups of any size and rank, which communicate nothing.
"""

import inspect
import itertools

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hand_rollout import spec_of
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import _initialize_affine_weight_cpu
from megatron.core.tensor_parallel.mappings import scatter_to_sequence_parallel_region
from megatron.core.transformer.moe.moe_utils import permute
from megatron.core.utils import get_batch_on_this_cp_rank
from torch.testing._internal.distributed.fake_pg import FakeStore

from tracerl.api.job import TrainerParallelism
from tracerl.api.model import ModelShape
from tracerl.engines.hf import hf_shapes
from tracerl.engines.megatron.host import host, join_groups, join_unit, quiet
from tracerl.engines.megatron.layers import GuidedAttention, GuidedExperts, GuidedMoE, Seat
from tracerl.engines.megatron.model import build, transformer_config
from tracerl.engines.megatron.slicing import (
    Held,
    Place,
    context_positions,
    expert_order,
    experts_of,
    heads_of,
    layers_of,
    pieces_of,
    rows_of,
    selection_of,
    sequence_positions,
)
from tracerl.engines.megatron.weights import cut_axis, parameters, to_hf, to_megatron
from tracerl.records.sites import SiteKind, site_table
from tracerl.rl.dealing import units_of

SHAPE = ModelShape.uniform(
    4, hidden=32, heads=8, kv_heads=4, head_dim=16, experts=8, top_k=2, expert_hidden=16, vocab=32, context=64
)
CPU = torch.device("cpu")


@pytest.fixture
def rank_of():
    """Make this process a rank of a layout; the groups of other tests are made anew when they need them."""

    def become(rank: int, **sizes: int) -> Place:
        leave()
        parallelism = TrainerParallelism(**sizes)
        world = parallelism.tensor * parallelism.pipeline * parallelism.context * parallelism.data
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        return join_groups(parallelism, CPU)

    def leave() -> None:
        parallel_state.destroy_model_parallel()
        if dist.is_initialized():
            dist.destroy_process_group()

    yield become
    leave()


def built(place: Place) -> GPTModel:
    """The model of a rank."""
    with host(CPU), quiet():
        config = transformer_config(SHAPE, place, torch.float32, CPU, {})
        return build(SHAPE, place, config, Seat(), CPU)


@pytest.mark.parametrize(
    "sizes",
    [
        {"data": 3},
        {"tensor": 2, "data": 2},
        {"context": 2, "data": 2, "expert": 2},
        {"tensor": 2, "data": 4, "expert": 4},
        {"tensor": 2, "context": 2, "pipeline": 2, "data": 2},
    ],
    ids=str,
)
def test_ranks_with_the_same_trajectories_are_of_one_unit(rank_of, sizes):
    """And those that compute together hold what a rank of them needs: whole units, whole expert groups."""
    parallelism = TrainerParallelism(**sizes)
    units = units_of(parallelism)
    assert len(units) == parallelism.ranks
    for rank in range(parallelism.ranks):
        rank_of(rank, **sizes)
        assert parallel_state.get_data_parallel_rank() == units[rank]
        group = join_unit(parallelism)
        if parallelism.ranks == parallelism.data and parallelism.expert == 1:
            assert group is None
            continue
        together = set(dist.get_process_group_ranks(group))
        assert {other for other, unit in enumerate(units) if unit == units[rank]} <= together
        experts = parallel_state.get_expert_model_parallel_group()
        assert set(dist.get_process_group_ranks(experts)) <= together
        # No more than that: of their units each is whole.
        assert len(together) == parallelism.ranks // parallelism.data * len({units[one] for one in together})


@pytest.mark.parametrize(("context", "length"), [(1, 12), (2, 12), (2, 64), (4, 64)])
def test_context_positions_are_megatrons(rank_of, context, length):
    held = []
    for rank in range(context):
        place = rank_of(rank, context=context)
        assert (place.context, place.context_rank) == (context, rank)
        batch = {"tokens": torch.arange(length).expand(3, -1).contiguous()}
        hybrid = "is_hybrid_cp" in inspect.signature(get_batch_on_this_cp_rank).parameters
        group = parallel_state.get_context_parallel_group()
        found = get_batch_on_this_cp_rank(
            batch, **({"is_hybrid_cp": False} if hybrid else {}), cp_group=group
        )
        positions = context_positions(length, place)
        assert torch.equal(found["tokens"], positions.expand(3, -1))
        held.append(positions)
    assert torch.equal(torch.cat(held).sort().values, torch.arange(length))


@pytest.mark.parametrize(("tensor", "context"), [(2, 1), (4, 1), (2, 2)])
def test_sequence_positions_are_megatrons(rank_of, tensor, context):
    for rank in range(tensor * context):
        place = rank_of(rank, tensor=tensor, context=context)
        assert 24 % place.multiple == 0
        whole = context_positions(24, place).view(-1, 1, 1)
        found = scatter_to_sequence_parallel_region(whole)
        assert torch.equal(found.flatten(), sequence_positions(24, place))


@pytest.mark.parametrize(
    "sizes",
    [
        {"tensor": 2},
        {"tensor": 4},
        {"expert": 2, "data": 2},
        {"expert": 4, "data": 8},
        {"tensor": 2, "expert": 2},
    ],
)
def test_a_rank_of_megatrons_holds_what_slicing_says(rank_of, sizes):
    """Heads, experts and shapes of every parameter, for each rank, of models that Megatron builds."""
    world = sizes.get("tensor", 1) * sizes.get("data", 1)
    whole = {name: torch.randn(size) for name, size in hf_shapes(SHAPE).items()}
    found_heads, found_experts = set(), set()
    for rank in range(world):
        place = rank_of(rank, **sizes)
        model = built(place)
        held = dict(model.named_parameters())
        mapped = parameters(SHAPE, place)
        assert {parameter.name for parameter in mapped} == set(held)
        for parameter in mapped:
            value = to_megatron(parameter, whole, SHAPE, place)
            assert value.shape == held[parameter.name].shape, parameter.name
        heads, experts = heads_of(SHAPE.kv_heads, place), experts_of(SHAPE.experts, place)
        for module in model.modules():
            if isinstance(module, GuidedAttention):
                assert module.num_query_groups_per_partition == len(heads)
            if isinstance(module, GuidedMoE):
                assert module.local_expert_indices == list(experts)
            if isinstance(module, GuidedExperts):
                assert len(module.local_experts) == len(experts)
        found_heads |= set(heads)
        found_experts |= set(experts)
    assert found_heads == set(range(SHAPE.kv_heads))
    assert found_experts == set(range(SHAPE.experts))


@pytest.mark.parametrize("pipeline", [1, 2, 4])
def test_layers_of_a_pipeline_rank_are_megatrons(rank_of, pipeline):
    """By the numbers that the layers carry to the sites: they count from the model's first layer."""
    seen = []
    for rank in range(pipeline):
        place = rank_of(rank, pipeline=pipeline)
        model = built(place)
        attention = [m.layer_number - 1 for m in model.modules() if isinstance(m, GuidedAttention)]
        experts = [m.layer_number - 1 for m in model.modules() if isinstance(m, GuidedExperts)]
        assert attention == experts == list(layers_of(SHAPE.layers, place))
        seen += attention
    assert seen == list(range(SHAPE.layers))


@pytest.mark.parametrize("tensor", [2, 4])
def test_shards_of_weights_are_megatrons(rank_of, tensor):
    """Megatron's own way to cut a weight that every rank makes whole, and the way back from all shards."""
    whole = {name: torch.randn(size) for name, size in hf_shapes(SHAPE).items()}
    shards: dict[str, list[torch.Tensor]] = {}
    mapped = []
    for rank in range(tensor):
        place = rank_of(rank, tensor=tensor)
        mapped = parameters(SHAPE, place)
        for parameter in mapped:
            value = to_megatron(parameter, whole, SHAPE, place)
            shards.setdefault(parameter.name, []).append(value)
            if parameter.axis is None:
                continue
            uncut = to_megatron(parameter, whole, SHAPE, Place())
            own = torch.empty(value.shape)
            _initialize_affine_weight_cpu(
                own,
                *uncut.shape,
                per_partition_size=value.shape[parameter.axis],
                partition_dim=parameter.axis,
                init_method=lambda weight, uncut=uncut: weight.copy_(uncut),
                rank=rank,
                world_size=tensor,
            )
            assert torch.equal(own, value), parameter.name
    parts: dict[str, list[torch.Tensor]] = {}
    for parameter in mapped:
        for shard in shards[parameter.name]:
            for name, part in to_hf(parameter, shard, SHAPE):
                parts.setdefault(name, []).append(part)
    assert set(parts) == set(whole)
    for name, found in parts.items():
        axis = cut_axis(name)
        assert torch.equal(found[0] if axis is None else torch.cat(found, dim=axis), whole[name]), name
        assert cut_axis(f"exp_avg/{name}") == axis


def test_a_head_of_a_shard_is_the_head_of_the_records(rank_of):
    """Keys of rank r's projection are those of KV heads heads_of(r), with the query heads that share them."""
    whole = {name: torch.randn(size) for name, size in hf_shapes(SHAPE).items()}
    x = torch.randn(5, SHAPE.hidden)
    name = "model.layers.1.self_attn."
    keys = (x @ whole[name + "k_proj.weight"].t()).view(5, SHAPE.kv_heads, SHAPE.head_dim)
    queries = (x @ whole[name + "q_proj.weight"].t()).view(5, SHAPE.heads, SHAPE.head_dim)
    share = SHAPE.heads // SHAPE.kv_heads
    for rank in range(2):
        place = rank_of(rank, tensor=2)
        model = built(place)
        attention = model.decoder.layers[1].self_attention
        heads = heads_of(SHAPE.kv_heads, place)
        for parameter in parameters(SHAPE, place):
            if parameter.name.startswith("decoder.layers.1.self_attention"):
                value = to_megatron(parameter, whole, SHAPE, place)
                dict(model.named_parameters())[parameter.name].data.copy_(value)
        mixed = x @ attention.linear_qkv.weight.t()
        by_head = mixed.view(5, len(heads), share + 2, SHAPE.head_dim)
        torch.testing.assert_close(by_head[:, :, share], keys[:, heads.start : heads.stop])
        mine = queries[:, heads.start * share : heads.stop * share]
        torch.testing.assert_close(by_head[:, :, :share].reshape(mine.shape), mine)


def test_experts_get_pairs_in_megatrons_order():
    generator = torch.Generator().manual_seed(0)
    for tokens, experts, top_k in ((1, 4, 2), (37, 8, 2), (64, 16, 4)):
        ids = torch.rand(tokens, experts, generator=generator).argsort(dim=1)[:, :top_k]
        routing_map = torch.zeros(tokens, experts, dtype=torch.bool).scatter(1, ids, True)
        numbered = torch.arange(tokens, dtype=torch.float32).unsqueeze(1)
        for held in (range(experts), range(experts // 2, experts), range(1)):
            here = routing_map[:, held.start : held.stop].contiguous()
            permuted = permute(numbered, here, num_out_tokens=int(here.sum()))[0]
            order = expert_order(ids, held)
            assert torch.equal(permuted.flatten().long(), order // top_k)
            mine = ids.flatten()[order]
            assert torch.equal(mine, mine.sort().values)
            assert set(mine.tolist()) <= set(held)


# -- records ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [[5], [1, 7, 3], [4, 4]])
@pytest.mark.parametrize(("tensor", "context"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_rows_of_all_ranks_are_the_stream_once(lengths, tensor, context):
    """And each lies where its token is: values are put and taken by rank as on one rank that has all."""
    stream = [(b, p) for b, length in enumerate(lengths) for p in range(length)]
    every: list[int] = []
    for tensor_rank, context_rank in itertools.product(range(tensor), range(context)):
        place = Place(tensor=tensor, tensor_rank=tensor_rank, context=context, context_rank=context_rank)
        longest = -(-max(lengths) // place.multiple) * place.multiple
        positions = sequence_positions(longest, place)
        held = Held.of(lengths, positions)
        rows = list(range(len(stream))) if held.rows is None else held.rows.tolist()
        every += rows
        assert held.size == len(positions) * len(lengths)
        grid = torch.tensor(
            [[b, p] for p in positions.tolist() for b in range(len(lengths))], dtype=torch.float
        )
        assert held.take(grid).tolist() == [list(map(float, stream[row])) for row in rows]
        marked = held.put(grid, -held.take(grid) - 1)
        assert torch.equal(held.take(marked), -held.take(grid) - 1)
        untouched = torch.ones(held.size, dtype=torch.bool)
        untouched[held.slots] = False
        assert torch.equal(marked[untouched], grid[untouched])
    assert sorted(every) == list(range(len(stream)))
    assert context * tensor > 1 or every == list(range(len(stream)))


@pytest.mark.parametrize("longest", [1, 5, 16, 37])
@pytest.mark.parametrize(("tensor", "context"), [(2, 1), (1, 2), (2, 2), (3, 4)])
def test_rows_that_a_rank_fetches_are_those_that_its_pass_takes(longest, tensor, context):
    """Against a count of tokens one by one, and against the rows that a pass takes of its records."""
    lengths = sorted({1, longest // 2 + 1, longest})
    padded = next(n for n in range(longest, 10**6) if n % (tensor * (2 * context if context > 1 else 1)) == 0)
    chunk = padded // (2 * context) if context > 1 else padded
    count = {kind: np.zeros(padded, int) for kind in SiteKind}
    for tensor_rank, context_rank in itertools.product(range(tensor), range(context)):
        place = Place(tensor=tensor, tensor_rank=tensor_rank, context=context, context_rank=context_rank)
        mine = [
            p
            for p in range(padded)
            if context == 1 or p // chunk in {context_rank, 2 * context - 1 - context_rank}
        ]
        shares = [
            mine[len(mine) * rank // tensor : len(mine) * (rank + 1) // tensor] for rank in range(tensor)
        ]
        expected = dict.fromkeys(SiteKind, shares[tensor_rank])
        expected |= {SiteKind.KEY: mine, SiteKind.VALUE: mine, SiteKind.EXACT_FROM: [*range(padded)]}
        for kind, positions in expected.items():
            needed = rows_of(kind, longest, place)
            assert np.flatnonzero(needed).tolist() == positions
            count[kind] += needed
        for kind, held in (
            (SiteKind.VALUE, Held.of(lengths, context_positions(padded, place))),
            (SiteKind.ROUTES, Held.of(lengths, sequence_positions(padded, place))),
        ):
            needed = np.concatenate([rows_of(kind, longest, place)[:length] for length in lengths])
            assert held.rows is not None or needed.all()
            if held.rows is not None:
                assert held.rows.tolist() == np.flatnonzero(needed).tolist()
    assert all((count[kind] == 1).all() for kind in (SiteKind.EXPERT_INPUT, SiteKind.ROUTES))
    assert all((count[kind] == tensor).all() for kind in (SiteKind.KEY, SiteKind.VALUE))


def test_gradients_of_padding_stay_and_those_of_rows_pass():
    held = Held.of([1, 3], torch.arange(3))
    assert held.padded
    x = torch.randn(held.size, 2, requires_grad=True)
    (held.put(x, held.take(x) * 2)).sum().backward()
    expected = torch.ones(held.size, 2)
    expected[held.slots] = 2
    assert torch.equal(x.grad, expected)


@pytest.mark.parametrize(
    ("lengths", "count", "expected"),
    [
        ([5, 9, 2, 9], 1, [[0, 1, 2, 3]]),
        ([5, 9, 2, 9], 2, [[0, 2], [1, 3]]),
        # The shortest first; of what is left over, one each to the first.
        ([7, 3, 5, 3, 8], 2, [[1, 2, 3], [0, 4]]),
        ([4, 4, 4], 3, [[0], [1], [2]]),
        ([6], 3, [[0], [], []]),
        ([], 2, [[], []]),
    ],
)
def test_trajectories_of_one_length_are_one_piece(lengths, count, expected):
    assert pieces_of(lengths, count) == expected


@pytest.mark.parametrize(("pipeline", "tensor"), [(2, 1), (1, 2), (2, 4), (4, 2)])
def test_selections_cover_every_group_of_every_site_once(pipeline, tensor):
    """Keys and values once over all ranks, what tensor ranks share once a pipeline stage."""
    spec = spec_of("TRACE", quantization={"secondInput": "Recorded"}, layers={"policy": "All"})
    table = site_table(SHAPE, spec)
    held = [np.zeros(site.groups, dtype=int) for site in table.sites]
    for pipeline_rank, tensor_rank in itertools.product(range(pipeline), range(tensor)):
        place = Place(pipeline=pipeline, pipeline_rank=pipeline_rank, tensor=tensor, tensor_rank=tensor_rank)
        selection = selection_of(table, SHAPE.layers, place)
        for piece in selection.slices:
            assert table.sites[piece.site].layer in layers_of(SHAPE.layers, place)
            held[piece.site][piece.start : piece.stop] += 1
    for site, counts in zip(table.sites, held, strict=True):
        expected = 1 if site.kind in {SiteKind.KEY, SiteKind.VALUE} else tensor
        assert (counts == expected).all(), site.name
    assert selection_of(table, SHAPE.layers, Place()) is None
    assert selection_of(table, SHAPE.layers, Place(expert=4, expert_rank=1)) is None
    # All of it, but of some rows.
    assert selection_of(table, SHAPE.layers, Place(expert=4, expert_rank=1, context=2)).slices == table.whole
