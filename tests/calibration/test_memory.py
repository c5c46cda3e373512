"""Memory from descriptions: counted by hand, and held against processes that opened a bundle."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from spec_export.calibration.devices import BOARDS, available_bytes, parse_bytes
from spec_export.calibration.memory import (
    cache_row_bytes,
    largest_context,
    memory_use,
    read_described,
    require_fit,
)
from spec_export.calibration.memory_plan import Limit, as_json, html, plan_memory, terminal_lines
from spec_export.calibration.weight_sizes import parts
from spec_export.engines.build import BuildOptions, build_bundle
from spec_export.engines.errors import BundleError, RequestError
from spec_export.engines.ort import OrtBackend
from spec_export.runtime.opened import OpenedBundle
from tests.precisions import derive

# Opens a bundle, fills the context of a session, and does that again: anonymous memory after each.
MEASURE = """
import json, sys
def resident():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024
import numpy, onnxruntime, tokenizers
from spec_export.runtime import Request, Session, generate, open_runtime
found = [resident()]
opened = open_runtime(sys.argv[1])
tokens = [5 + n % 7 for n in range(opened.manifest.max_len - 16)]
kept = []
for _ in range(int(sys.argv[2])):
    kept.append(Session(opened))
    for _ in generate(kept[-1], tokens, Request(ignore_end=True)): pass
    found.append(resident())
print(json.dumps(found))
"""

on_linux = pytest.mark.skipif(
    not Path("/proc/self/status").is_file(), reason="reads the memory of a process from /proc"
)


def measure(bundle: Path, sessions: int) -> list[int]:
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, str(bundle), str(sessions)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    found: list[int] = json.loads(run.stdout.splitlines()[-1])
    return found


def test_weights_and_caches_of_the_tiny_pair_by_hand(tiny_bundle, open_once):
    described, opened = read_described(tiny_bundle), open_once(tiny_bundle)
    use = memory_use(described)
    manifest = opened.manifest
    assert use.max_len == 128
    assert sum(use.caches.values()) == opened.session_bytes()
    assert use.weights == {name: spec.parameters_bytes for name, spec in manifest.models.items()}
    rows = {name: cache_row_bytes(spec) for name, spec in manifest.models.items()}
    for name, spec in manifest.models.items():
        state = spec.states[0]
        heads, size = int(state.dims[1]), int(state.dims[3])
        assert rows[name] == 2 * spec.layers * heads * size * 4
    assert sum(count for _, count in use.parts()) == use.total


def test_an_exported_directory_is_planned_as_the_bundle_it_becomes(tiny_pair_exported, tiny_bundle):
    shapes = {"max_len": 128, "gammas": (4,), "chunk": 32}
    exported = memory_use(read_described(tiny_pair_exported, **shapes))
    assert exported == memory_use(read_described(tiny_bundle))


def test_without_drafts_the_draft_and_its_lookahead_are_gone(tiny_bundle):
    described = read_described(tiny_bundle, gammas=(16,), chunk=2)
    plain = memory_use(described.plain())
    use = memory_use(described)
    assert set(plain.weights) == set(plain.caches) == {"target"}
    assert plain.caches["target"] < use.caches["target"], "rows past the context for drafts"
    assert plain.buffers < use.buffers


def test_the_longest_context_is_the_longest_that_fits(tiny_bundle):
    described = read_described(tiny_bundle)
    limit = memory_use(described, 300).total
    context = largest_context(described, limit)
    assert context is not None and context >= 300
    assert memory_use(described, context).total <= limit
    assert memory_use(described, context + 1).total > limit
    assert largest_context(described, 1 << 40) == described.positions
    assert largest_context(described, 1000) is None
    plain = largest_context(described.plain(), limit)
    assert plain is not None and plain > context


def test_what_cannot_fit_is_refused_before_anything_is_allocated(tiny_bundle):
    described = read_described(tiny_bundle, max_len=512)
    limit = memory_use(described, 300).total
    with pytest.raises(RequestError, match=r"needs \d+ MB, but this machine has \d+ MB; rebuild"):
        require_fit(described, limit, "this machine")
    with pytest.raises(RequestError, match="no context is short enough"):
        require_fit(described, 1000, "this machine")
    assert require_fit(described, 1 << 40, "this machine") == memory_use(described)


def test_half_precision_is_counted_as_the_engine_keeps_it(tiny_bundle):
    described = read_described(tiny_bundle)
    target = replace(described.models["target"], dtype="float16", parameters_bytes=1000)
    half = replace(described, models={"target": target}, widens=True)
    assert memory_use(half).weights == {"target": 2000}
    assert memory_use(replace(half, widens=False)).weights == {"target": 1000}
    said = "\n".join(terminal_lines(plan_memory(replace(half, widens=False), None)))
    assert "twice as large" in said


@on_linux
def test_a_session_takes_the_caches_and_buffers_that_were_planned(build_tiny):
    """Of the tiny pair only the sessions are large: weights are few, constants of the process many.

    Ten sessions after the first, each over its whole context, so that every row of every cache is
    touched; the bound of 10 % is the one that is promised.
    """
    bundle = build_tiny("pair", max_len=512)
    use = memory_use(read_described(bundle))
    found = measure(bundle, 11)
    each = (found[-1] - found[1]) / 10
    assert each == pytest.approx(sum(use.caches.values()) + use.buffers, rel=0.1)


@pytest.mark.model
@pytest.mark.slow
@on_linux
def test_smollm2_takes_what_was_planned(smollm2_bundle):
    """Weights of 538 MB, a vocabulary of 49,152 and a context of 1,024 tokens, within 10 %."""
    use = memory_use(read_described(smollm2_bundle))
    found = measure(smollm2_bundle, 1)
    assert found[1] - found[0] == pytest.approx(use.bundle, rel=0.1)


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("asked", [{"head": "int8"}, {"kv": "int8"}])
@on_linux
def test_smollm2_of_int8_takes_what_was_planned(smollm2_exported, tmp_path, asked):
    """As quantized in blocks of 32: with and without its head and its caches."""
    derived = derive(
        smollm2_exported, tmp_path / "q", backend="onnxruntime", weights="int8", **asked
    )
    bundle = build_bundle(derived, tmp_path / "bundle", OrtBackend(), BuildOptions(gamma=4)).path
    use = memory_use(read_described(bundle))
    found = measure(bundle, 1)
    assert found[1] - found[0] == pytest.approx(use.bundle, rel=0.1)


# --- quantized -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "asked"),
    [
        ("onnxruntime", {"weights": "int8"}),
        ("onnxruntime", {"weights": "int4", "quantizer": "rtn"}),
        ("onnxruntime", {"weights": "int4", "quantizer": "rtn", "head": "int8", "block": 16}),
        ("onnxruntime", {"weights": "int8", "quantizer": "k-quant", "head": "int4"}),
        ("tensorrt-rtx", {"weights": "fp8"}),
        ("tensorrt-rtx", {"weights": "nvfp4"}),
        ("tensorrt-rtx", {"weights": "int8", "head": "int8"}),
    ],
)
def test_the_hidden_size_of_a_quantized_model_is_that_of_the_model(
    tiny_pair_exported, tmp_path, backend, asked
):
    """It was derived as though all weights had the size of those that stayed: a third, for int4.

    The one of float32 is an estimate as well; the two differ by what norms and rounding take.
    """
    derived = derive(tiny_pair_exported, tmp_path, backend=backend, **asked)
    before = read_described(tiny_pair_exported).models["target"]
    after = read_described(derived).models["target"]
    assert parts(after).hidden == pytest.approx(parts(before).hidden, rel=0.05)
    stored = parts(after)
    total = stored.embedding + stored.head + stored.layers
    assert total == pytest.approx(after.parameters_bytes)
    embedding = 1031 * 160 * 4
    assert stored.embedding == pytest.approx(embedding, rel=0.1)


def test_caches_of_int8_are_planned_as_a_quarter(tiny_pair_exported, tmp_path):
    """A plan of them ended in a KeyError."""
    derived = derive(tiny_pair_exported, tmp_path, backend="onnxruntime", weights="int8", kv="int8")
    mine, other = (memory_use(read_described(path)) for path in (derived, tiny_pair_exported))
    for name, count in mine.caches.items():
        assert 4 * count == other.caches[name]
    assert sum(mine.weights.values()) < sum(other.weights.values())
    assert "caches take" in "\n".join(terminal_lines(plan_memory(read_described(derived), None)))


def test_a_quantized_directory_is_planned_as_the_bundle_it_becomes(tiny_pair_exported, tmp_path):
    derived = derive(tiny_pair_exported, tmp_path / "q", backend="onnxruntime", weights="int8")
    options = BuildOptions(gamma=4, max_len=128, chunk=32)
    bundle = build_bundle(derived, tmp_path / "bundle", OrtBackend(), options).path
    exported = read_described(derived, max_len=128, gammas=(4,), chunk=32)
    assert memory_use(exported) == memory_use(read_described(bundle))


def test_a_plan_names_what_fits(tiny_bundle):
    described = read_described(tiny_bundle, max_len=512)
    limit = Limit(memory_use(described, 300).total, "the limit")
    plan = plan_memory(described, limit)
    assert not plan.fits
    lines = terminal_lines(plan)
    assert lines[0].startswith("does not fit") and f"up to {plan.largest} tokens fit" in lines[0]
    assert f"without drafts {plan.largest_plain} tokens" in lines[0]
    assert any(line.startswith("->    512") and "over" in line for line in lines)
    table = lines[1 : next(n for n, line in enumerate(lines) if line.startswith("- "))]
    assert max(map(len, table)) < 80
    assert "Does not fit" in html(plan)
    assert as_json(plan)["largest_max_len"] == plan.largest
    roomy = plan_memory(described, Limit(1 << 40, "the limit"))
    assert "up to 512 tokens (all the target has positions for) fit" in terminal_lines(roomy)[0]
    assert "no context fits" in terminal_lines(plan_memory(described, Limit(10, "the limit")))[0]


@pytest.mark.parametrize(
    ("text", "count"),
    [("8GiB", 8 << 30), ("500 MB", 500_000_000), ("1.5gb", 1_500_000_000), ("4096", 4096)],
)
def test_amounts(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "8 GX", "nan", "1e9", "0", "9" * 40, "8GiB8"])
def test_what_is_no_amount_is_refused(text):
    with pytest.raises(RequestError, match="amount"):
        parse_bytes(text)


def test_boards_leave_less_than_they_have():
    for board in BOARDS.values():
        assert 0.6 * board.memory < board.usable < board.memory


def test_available_memory(tmp_path):
    file = tmp_path / "meminfo"
    file.write_text("MemTotal: 100 kB\nMemAvailable:   40 kB\n")
    assert available_bytes(file) == 40 * 1024
    assert available_bytes(tmp_path / "none") is None
    file.write_text("MemTotal: 100 kB\n")
    assert available_bytes(file) is None


@pytest.mark.parametrize(
    "shapes",
    [{"max_len": 1}, {"max_len": 10**6}, {"gammas": (0,)}, {"gammas": (17,)}, {"chunk": 1}],
)
def test_shapes_that_fit_no_model_are_refused(tiny_pair_exported, shapes):
    with pytest.raises(RequestError):
        read_described(tiny_pair_exported, **shapes)


def test_what_is_no_description_is_refused(tiny_pair_exported, tmp_path):
    with pytest.raises(BundleError, match="neither"):
        read_described(tmp_path)
    found = json.loads((tiny_pair_exported / "graphs.json").read_text())
    found["models"]["target"]["parameters_bytes"] = -5
    (tmp_path / "graphs.json").write_text(json.dumps(found))
    with pytest.raises(BundleError, match="-5 bytes"):
        read_described(tmp_path)


def test_describing_opens_no_engine(tiny_bundle, monkeypatch):
    monkeypatch.setattr(OpenedBundle, "__init__", lambda *_: pytest.fail("opened"))
    read_described(tiny_bundle)
