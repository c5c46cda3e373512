"""What a TensorRT build decides without the library: sizes, memory, and what an inspector shows."""

from __future__ import annotations

import json

import pytest

from spec_export.compiling import parse_bytes
from spec_export.engines.errors import BuildError, EngineError, RequestError
from spec_export.engines.trt_inspect import spelled_out
from spec_export.engines.trt_memory import DeviceMemory, check_memory


def test_sizes_are_read_as_they_are_written():
    assert parse_bytes("2GiB") == 2 << 30 and parse_bytes("512M") == 512 << 20
    assert parse_bytes("1.5GiB") == 3 << 29 and parse_bytes("4096") == 4096
    for wrong in ("much", "-1", "2TB", ""):
        with pytest.raises(RequestError, match="such as 2GiB"):
            parse_bytes(wrong)


def test_what_cannot_fit_is_refused_before_it_is_built():
    needed = DeviceMemory(weights=6 << 30, caches=1 << 30, scratch=1 << 28, code=1 << 26)
    check_memory(needed, 1 << 30, 8 << 30)
    with pytest.raises(BuildError, match=r"about 7\.31 GiB.*4\.00 GiB are free.*--weights int8"):
        check_memory(needed, None, 4 << 30)
    with pytest.raises(BuildError, match=r"--workspace 128\.0 MiB.*256\.0 MiB.*--chunk"):
        check_memory(needed, 128 << 20, None)


# --- the inspector -------------------------------------------------------------------------------

FUSED = {"Name": "_gemm_mha_v2_myl0_11", "LayerType": "kgen", "Metadata": "[ONNX Layer: attend_3]"}
SPELLED = {
    "Name": "__myl_MaxSubExpSumDiv_myl0_5",
    "LayerType": "kgen",
    "Metadata": "[ONNX Layer: attend_7]",
}


def test_a_softmax_of_its_own_is_attention_that_was_not_fused():
    """TensorRT 4738: the layer is named as the graph names it."""
    assert spelled_out(json.dumps({"Layers": [FUSED]}), "target") == ()
    found = spelled_out(json.dumps({"Layers": [FUSED, SPELLED]}), "target")
    assert found == ("attend_7 (__myl_MaxSubExpSumDiv_myl0_5)",)
    assert spelled_out(json.dumps({"Layers": ["softmax_1", "fc"]}), "target") == ("softmax_1",)


@pytest.mark.parametrize("report", ["", "[]", "{}", '{"Layers": []}'])
def test_a_report_that_proves_nothing_is_no_proof(report):
    with pytest.raises(EngineError, match="inspector"):
        spelled_out(report, "target")
