"""Outputs handed to Polygraphy: it judges them as we do, and its files hold what was compared."""

from __future__ import annotations

import numpy as np
import pytest

from spec_export.engines.certify import certify
from spec_export.engines.errors import StorageError
from spec_export.engines.manifest import DeviceSpec
from spec_export.engines.ort import OrtBackend
from spec_export.engines.passes import PassRunner

pytest.importorskip("polygraphy", reason="polygraphy is not installed")

from spec_export.engines.polygraphy_runs import PolygraphyRuns


def here(_: DeviceSpec) -> OrtBackend:
    return OrtBackend()


def test_outputs_within_their_tolerance_agree_and_others_are_named():
    runs = PolygraphyRuns("engine", "standard")
    row = np.linspace(-1, 1, 8, dtype=np.float32)
    runs.add({"logits": row, "present": row}, {"logits": row, "present": row})
    runs.add({"logits": row, "present": row}, {"logits": row + 0.01, "present": row + 0.01})
    assert runs.outputs == 4
    assert runs.disagreements(0.02, 0.02) == []
    assert runs.disagreements(0.005, 0.02) == ["logits in pass 1"]
    assert runs.disagreements(0.02, 0.005) == ["present in pass 1"]
    broken = PolygraphyRuns("engine", "standard")
    broken.add({"logits": row * np.nan}, {"logits": row})
    assert broken.disagreements(1.0, 1.0) == ["logits in pass 0"]


def test_a_check_keeps_its_passes_for_polygraphy(tiny_bundle, tmp_path):
    from polygraphy.comparator import RunResults

    found = certify(tiny_bundle, here, runs=tmp_path / "runs")
    assert found.passed
    for name, said in found.polygraphy.items():
        file = tmp_path / "runs" / f"{name}.json"
        kept = RunResults.load(str(file))
        assert list(kept.keys()) == ["onnxruntime", "standard graph in onnxruntime"]
        passes = found.engines[name].passes
        assert len(kept["onnxruntime"]) == passes
        outputs = sum(len(made) for made in kept["onnxruntime"])
        assert outputs > 2 * passes, "logits and caches"
        assert said == f"{outputs} of {outputs} outputs agree, in {file}"


def test_an_engine_that_computes_something_else_fails_there_too(tiny_bundle, tmp_path, monkeypatch):
    """Negative control: what the first of the two engines makes of one pass is a little off."""
    run, calls = PassRunner.run, []

    def off(self, role, tokens, kv_len, logit_rows):
        logits = run(self, role, tokens, kv_len, logit_rows)
        if role == "verify" and kv_len == 0:
            calls.append(role)
            return logits + (len(calls) == 1)
        return logits

    monkeypatch.setattr(PassRunner, "run", off)
    found = certify(tiny_bundle, here, runs=tmp_path)
    assert any("Polygraphy finds 1 outputs of the target" in words for words in found.failures)


def test_a_folder_that_cannot_be_written_is_an_error(tiny_bundle, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError):
        certify(tiny_bundle, here, runs=tmp_path / "file" / "runs")


def test_the_command_line_has_it(cli_free, tiny_bundle, tmp_path):
    called = cli_free("check", tiny_bundle, "--polygraphy", tmp_path / "runs")
    assert "polygraphy" in called and "outputs agree" in called


@pytest.fixture
def cli_free():
    from typer.testing import CliRunner

    from spec_export.cli import app

    def call(*arguments) -> str:
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        assert result.exit_code == 0, result.output
        return result.output

    return call
