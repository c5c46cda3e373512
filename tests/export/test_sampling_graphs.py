"""What `export` writes for sampling: which graphs, plain ONNX, small, and accepted by TensorRT."""

from __future__ import annotations

from functools import cache

import onnx
import onnx_ir as ir
import pytest

from spec_export.engines.graphs import (
    WeighingKey,
    padded_vocabulary,
    race_blocks,
    race_size,
    weighing_keys,
)
from spec_export.export.sampling_graphs import sampling_graphs
from tests.sampling_run import KEYS, model
from tests.tensorrt_compile import compile_graph

FILTERING = {"filter_top", "filter_nucleus", "filter_any", "filter_typical"}
CHOOSING = {
    *("accept_greedy", "accept_edited", "accept_one_hot", "accept_dense", "accept_block"),
    *("accept_invariant", "sample_greedy", "sample_edited", "sample_drawn", "top_logprobs"),
    "position_races",
}
PROPOSING = {"propose_greedy", "propose_edited", "propose_drawn", "confidence"}
# What TensorRT leaves open or refuses: order among ties, and sizes that depend on data.
UNWANTED = {"TOPK", "NON_ZERO", "CONDITION", "TRIP_LIMIT"}


@cache
def written(V: int, Vd: int | None) -> dict[str, onnx.ModelProto]:
    return {name: ir.to_proto(graph) for name, graph in sampling_graphs(V, Vd).items()}


def test_which_graphs_there_are() -> None:
    """A sum, not a product: what weighs does not know the rule, nor the rule what was weighed."""
    target = {key.name for key in weighing_keys("target")}
    draft = {key.name for key in weighing_keys("draft")}
    assert set(written(70, None)) == target | FILTERING | CHOOSING
    assert set(written(70, 70)) == target | FILTERING | CHOOSING | PROPOSING
    assert set(written(70, 66)) == target | draft | FILTERING | CHOOSING | PROPOSING
    for name, proto in written(70, 66).items():
        assert proto.SerializeToString() == model(name, 70, 66).SerializeToString()


def test_names_say_what_is_on() -> None:
    assert WeighingKey().name == "distribution"
    assert WeighingKey("draft", False, True, True).name == "draft_scores+edits+mask"
    assert WeighingKey(edits=True).name == "distribution+edits"
    assert len(set(KEYS)) == 2 * 7
    assert all(key.name == name for name, key in KEYS.items())


def test_what_is_off_is_not_in_the_graph() -> None:
    """No input of a group, and no node for it."""
    groups = {
        "edits": {"history", "n_history", "draft_tokens", "bias_ids", "repetition", "end_from"},
        "mask": {"allowed"},
    }
    plain = written(70, None)["distribution"]
    assert [node.op_type for node in plain.graph.node] == ["Squeeze", "Pad", "Div", "Softmax"]
    for name, key in KEYS.items():
        inputs = {value.name for value in model(name, 70, 66).graph.input}
        on = {"edits": key.edits, "mask": key.mask}
        for group, names in groups.items():
            assert bool(inputs & names) == on[group], (name, group)


def test_the_graphs_are_plain_onnx() -> None:
    for name, proto in written(1031, 1000).items():
        onnx.checker.check_model(proto, full_check=True)
        assert {(o.domain, o.version) for o in proto.opset_import} == {("", 24)}
        assert proto.ByteSize() < (80_000 if name.endswith(("any", "typical")) else 30_000), name
        assert not {node.op_type for node in proto.graph.node} & {"If", "Loop", "NonZero", "ArgMax"}


@pytest.mark.parametrize("V", [1, 3, 64, 65, 4096, 4097, 50257, 151_936, 262_144])
def test_a_race_has_few_numbers_and_covers_every_token(V: int) -> None:
    B, V64 = race_blocks(V), padded_vocabulary(V)
    assert V64 % B == 0 and V64 // B in (1, 2, 4, 8, 16)
    assert 0 <= race_size(V) - (B + V64 // B) < 64 and race_size(V) % 64 == 0
    assert race_size(V) <= max(4096, V64 // 16) + 64
    shape = model("sample_drawn", V).graph.input[-1].type.tensor_type.shape
    assert [dim.dim_value for dim in shape.dim] == [1, race_size(V)]


# --- TensorRT -------------------------------------------------------------------------------------

SIZES = {"G": 4, "M": 5, "D": 4, "W": 10, "C": 160}


def check_compiled(name: str, proto: onnx.ModelProto) -> None:
    rows = 1 if name.startswith("draft_") else 5
    network = compile_graph(proto, SIZES | {"R": rows})
    assert network.engine_bytes
    assert not [shape for _, shape in network.outputs.values() if -1 in shape]
    listing = name.endswith(("top", "nucleus")) or name == "top_logprobs"
    assert bool(UNWANTED & set(network.layers)) == listing, "lists are for CPUs"


def test_every_graph_compiles_in_tensorrt() -> None:
    pytest.importorskip("tensorrt_rtx", reason="tensorrt_rtx is not installed")
    for name, proto in written(1031, 1000).items():
        check_compiled(name, proto)


@pytest.mark.parametrize(
    "name",
    [
        *("distribution", "distribution+edits", "distribution+mask", "filter_any"),
        *("accept_greedy", "accept_one_hot", "accept_dense", "accept_block", "accept_invariant"),
        *("sample_drawn", "propose_drawn", "confidence"),
    ],
)
def test_the_graphs_of_a_real_vocabulary_compile_in_tensorrt(name: str) -> None:
    pytest.importorskip("tensorrt_rtx", reason="tensorrt_rtx is not installed")
    check_compiled(name, model(name, 49152))


def test_tensorrt_takes_a_history_longer_than_the_vocabulary() -> None:
    """Its ScatterElements takes no more indices than a row is long; these graphs use ScatterND."""
    pytest.importorskip("tensorrt_rtx", reason="tensorrt_rtx is not installed")
    proto = model("scores+edits", 65)
    assert SIZES["C"] > padded_vocabulary(65)
    check_compiled("scores+edits", proto)


def test_dropping_types_keeps_the_shapes_of_what_comes_out() -> None:
    """Readers infer what lies between; inputs and outputs say what they are."""
    for name, proto in written(70, 66).items():
        made = {output for node in proto.graph.node for output in node.output}
        assert not made & {value.name for value in proto.graph.value_info}, name
        for value in proto.graph.output:
            assert value.type.tensor_type.shape.dim, (name, value.name)
