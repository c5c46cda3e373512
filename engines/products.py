"""The products of a graph by constant matrices: what quantization is about."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import onnx_ir as ir


@dataclass(frozen=True)
class Product:
    """A `MatMul` by a constant matrix.

    Attributes:
        node: the product.
        weight: the initializer.
        is_transposed: the initializer is `[N, K]`, and a node between the two transposes it.
        is_head: the product is the logits.
    """

    node: ir.Node
    weight: ir.Value
    is_transposed: bool
    is_head: bool

    @property
    def source(self) -> ir.Value:
        """The value that the matrix is multiplied by."""
        found = self.node.inputs[0]
        assert found is not None and found.name is not None
        return found

    @property
    def shape(self) -> tuple[int, int]:
        """K and N."""
        assert self.weight.shape is not None
        rows, columns = self.weight.shape.numpy()
        return (columns, rows) if self.is_transposed else (rows, columns)

    def drop_weight(self, graph: ir.Graph) -> None:
        """Forget the initializer where nothing reads it any more; also what transposed it."""
        for node in [n for n in self.weight.consumers() if n.op_type == "Transpose"]:
            if not node.outputs[0].consumers():
                graph.remove(node, safe=True)
        if not self.weight.consumers():
            graph.initializers.pop(str(self.weight.name), None)


def products(graph: ir.Graph, *, head: bool) -> list[Product]:
    """The matrices that are quantized, in the order they are used."""
    found = []
    for node in graph:
        product = _product(graph, node) if node.op_type == "MatMul" else None
        if product is not None and (head or not product.is_head):
            found.append(product)
    return found


def by_source(found: Iterable[Product]) -> dict[str, list[Product]]:
    """Products by the name of the value that their matrices are multiplied by."""
    groups: dict[str, list[Product]] = {}
    for product in found:
        groups.setdefault(str(product.source.name), []).append(product)
    return groups


def sample_names(graph: ir.Graph) -> list[str]:
    """Values that matrices inside the layers are multiplied by, each once."""
    return list(by_source(products(graph, head=False)))


def _product(graph: ir.Graph, node: ir.Node) -> Product | None:
    weight, result = node.inputs[1], node.outputs[0]
    names = {result.name, *(out.name for user in result.consumers() for out in user.outputs)}
    is_head = "logits" in names
    turned = None if weight is None else weight.producer()
    if turned is not None and turned.op_type == "Transpose" and is_head:
        assert weight is not None
        original = turned.inputs[0]
        if original is not None and original.name in graph.initializers:
            return Product(node, original, True, True)
    if weight is None or weight.name not in graph.initializers or len(weight.shape or ()) != 2:
        return None
    is_shared = len(weight.consumers()) != 1
    return None if is_shared and not is_head else Product(node, weight, False, is_head)
