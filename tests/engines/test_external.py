"""External data of hostile ONNX files: found wherever a tensor can stand, refused elsewhere.

The files are made with onnx and read by our own walk over the protobuf, which has no ONNX library.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from spec_export.engines.errors import IntegrityError
from spec_export.engines.external import check_external, external_names


def tensor(location: str, name: str = "w") -> TensorProto:
    made = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=[2])
    made.data_location = TensorProto.EXTERNAL
    for key, value in (("offset", "0"), ("location", location), ("length", "8")):
        made.external_data.add(key=key, value=value)
    return made


def graph(*nodes, initializers=(), sparse=()) -> onnx.GraphProto:
    made = helper.make_graph(list(nodes), "g", [], [], list(initializers))
    made.sparse_initializer.extend(sparse)
    return made


def constant(location: str) -> onnx.NodeProto:
    return helper.make_node("Constant", [], ["c"], value=tensor(location))


def sparse(location: str) -> onnx.SparseTensorProto:
    made = onnx.SparseTensorProto(dims=[4])
    made.values.CopyFrom(tensor(location))
    return made


def in_initializer(location: str) -> onnx.ModelProto:
    return helper.make_model(graph(initializers=[tensor(location)]))


def in_constant(location: str) -> onnx.ModelProto:
    return helper.make_model(graph(constant(location)))


def in_list_attribute(location: str) -> onnx.ModelProto:
    node = helper.make_node("X", [], [], domain="d", tensors=[tensor("a"), tensor(location)])
    return helper.make_model(graph(node))


def in_branch(location: str) -> onnx.ModelProto:
    inner = helper.make_node("If", ["c"], [], then_branch=graph(constant(location)))
    return helper.make_model(graph(helper.make_node("If", ["c"], [], else_branch=graph(inner))))


def in_sparse_initializer(location: str) -> onnx.ModelProto:
    return helper.make_model(graph(sparse=[sparse(location)]))


def in_sparse_attribute(location: str) -> onnx.ModelProto:
    node = helper.make_node("Constant", [], ["c"], sparse_value=sparse(location))
    return helper.make_model(graph(node))


def in_function(location: str) -> onnx.ModelProto:
    made = helper.make_model(graph())
    function = helper.make_function("d", "f", [], ["c"], [constant(location)], [])
    made.functions.append(function)
    return made


def in_function_default(location: str) -> onnx.ModelProto:
    made = in_function("a")
    default = helper.make_attribute("value", tensor(location))
    made.functions[0].attribute_proto.append(default)
    return made


def in_training(location: str) -> onnx.ModelProto:
    made = helper.make_model(graph())
    made.training_info.add().initialization.CopyFrom(graph(initializers=[tensor(location)]))
    return made


PLACES = [
    in_initializer,
    in_constant,
    in_list_attribute,
    in_branch,
    in_sparse_initializer,
    in_sparse_attribute,
    in_function,
    in_function_default,
    in_training,
]
HOSTILE = [
    "../secret",
    "/etc/passwd",
    "sub/weights",
    "..",
    ".",
    "",
    "weights/../../secret",
    "..\\secret",
    "C:\\secret",
    "unlisted",
    "weights\0",
]


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_a_location_is_found_wherever_it_stands(place, tmp_path):
    file = tmp_path / "model.onnx"
    onnx.save(place("../secret"), file)
    assert "../secret" in external_names(file)
    with pytest.raises(IntegrityError, match=r"'\.\./secret', which is not a listed file"):
        check_external(file, frozenset({"a", "weights"}))


@pytest.mark.parametrize("location", HOSTILE)
def test_a_location_that_is_not_a_listed_file_beside_the_graph_is_refused(location, tmp_path):
    file = tmp_path / "model.onnx"
    onnx.save(in_initializer(location), file)
    with pytest.raises(IntegrityError):
        check_external(file, frozenset({"weights", "model.onnx", "sub/weights"}))


def test_a_listed_file_is_allowed(tmp_path):
    file = tmp_path / "model.onnx"
    onnx.save(in_initializer("weights"), file)
    check_external(file, frozenset({"weights"}))


def test_every_weight_of_a_real_graph_is_found(tiny_pair_exported):
    file = tiny_pair_exported / "target" / "model.onnx"
    model = onnx.load(file, load_external_data=False)
    named = {
        entry.value
        for weight in model.graph.initializer
        for entry in weight.external_data
        if entry.key == "location"
    }
    assert external_names(file) == named == {"model.onnx.data"}


@pytest.mark.parametrize(
    "content",
    [
        b"\xff" * 20,
        b"\x3a\xff\xff\xff\xff\x0f",  # a graph said to be longer than the file
        b"\x3b",  # a group, which ONNX does not have
        b"\x3a",
        b"\x39\x00",
        b"\x3a\x04\x2a\x02\x6a\x05",  # nested past its own end
    ],
)
def test_what_is_no_protobuf_is_refused(content, tmp_path):
    file = tmp_path / "model.onnx"
    file.write_bytes(content)
    with pytest.raises(IntegrityError, match="not an ONNX file"):
        external_names(file)


def test_nesting_is_bounded(tmp_path):
    """A stack of branches ends in an error of ours, not in one of Python's."""
    inner = graph(constant("../secret"))
    for _ in range(20):
        inner = graph(helper.make_node("If", ["c"], [], then_branch=inner))
    file = tmp_path / "model.onnx"
    file.write_bytes(helper.make_model(inner).SerializeToString())
    with pytest.raises(IntegrityError, match="nested too deeply"):
        external_names(file)


@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_a_damaged_graph_is_refused_or_read(data, tmp_path_factory):
    """Any bytes changed, any end cut off: names or `IntegrityError`, nothing else."""
    whole = bytearray(in_branch("weights").SerializeToString())
    cut = data.draw(st.integers(0, len(whole)))
    damaged = whole[:cut]
    for _ in range(data.draw(st.integers(0, 4))):
        if damaged:
            at = data.draw(st.integers(0, len(damaged) - 1))
            damaged[at] = data.draw(st.integers(0, 255))
    file: Path = tmp_path_factory.getbasetemp() / "damaged.onnx"
    file.write_bytes(damaged)
    with contextlib.suppress(IntegrityError):
        assert all(isinstance(name, str) for name in external_names(file))
