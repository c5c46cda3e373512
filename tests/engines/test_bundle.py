"""A bundle is untrusted input: whatever was done to it, it opens as it was built or not at all."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from spec_export.engines import bundle as bundles
from spec_export.engines.build import BuildOptions, build_bundle, read_exported
from spec_export.engines.bundle import VerifiedFiles, hash_file, open_bundle
from spec_export.engines.errors import (
    BundleError,
    IntegrityError,
    SchemaError,
    SpecExportError,
)
from spec_export.engines.graphs import GRAPHS_FILE
from spec_export.engines.manifest import MANIFEST_FILE
from spec_export.engines.ort import OrtBackend
from spec_export.runtime import Request, Sampling, Session, generate, open_runtime

Path_ = tuple[str | int, ...]


@pytest.fixture
def bundle(tiny_bundle, tmp_path) -> Path:
    """A bundle that may be harmed."""
    return Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))


def change_manifest(bundle: Path, change) -> None:
    file = bundle / MANIFEST_FILE
    manifest = json.loads(file.read_text(encoding="utf-8"))
    change(manifest)
    file.write_text(json.dumps(manifest), encoding="utf-8")


def listed(bundle: Path) -> dict[str, dict[str, Any]]:
    return json.loads((bundle / MANIFEST_FILE).read_text(encoding="utf-8"))["files"]


def test_an_untouched_copy_opens(bundle, tiny_bundle):
    opened = open_bundle(bundle)
    assert opened.manifest == open_bundle(tiny_bundle).manifest
    assert opened.sha256 == hash_file(tiny_bundle / MANIFEST_FILE)


def test_every_file_is_listed(tiny_bundle):
    found = {
        file.relative_to(tiny_bundle).as_posix()
        for file in tiny_bundle.rglob("*")
        if file.is_file()
    }
    assert found == {*listed(tiny_bundle), MANIFEST_FILE}


def test_a_changed_byte_in_any_file_is_found(bundle):
    for relative in listed(bundle):
        file = bundle / relative
        content = file.read_bytes()
        at = len(content) // 2
        file.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with pytest.raises(IntegrityError, match=f"{re.escape(relative)} was altered"):
            open_bundle(bundle)
        file.write_bytes(content)
    open_bundle(bundle)


@pytest.mark.parametrize("left", [0, 100, -1])
def test_truncated_weights_are_found(bundle, left):
    file = bundle / "target" / "model.onnx.data"
    os.truncate(file, left if left >= 0 else file.stat().st_size - 1)
    with pytest.raises(IntegrityError, match="it was cut or altered"):
        open_bundle(bundle)


def test_a_missing_file_is_named(bundle):
    for relative in listed(bundle):
        file = bundle / relative
        content = file.read_bytes()
        file.unlink()
        with pytest.raises(IntegrityError, match=f"{re.escape(relative)} is missing"):
            open_bundle(bundle)
        file.write_bytes(content)


@pytest.mark.parametrize(
    "relative",
    [
        "../secret",
        "/etc/passwd",
        "target/../../secret",
        "target/../target/model.onnx",
        "./target/model.onnx",
        "target//model.onnx",
        "target/model.onnx/",
        "",
        ".",
        "\0",
        "target/\ud800",
        "target/" + "x" * 5000,
    ],
)
def test_a_path_that_leaves_the_bundle_or_is_not_plain_is_refused(bundle, relative):
    (bundle.parent / "secret").write_text("secret")
    entry = {"sha256": hash_file(bundle.parent / "secret"), "bytes": 6}
    change_manifest(bundle, lambda manifest: manifest["files"].update({relative: entry}))
    with pytest.raises((IntegrityError, SchemaError)):
        open_bundle(bundle)


@pytest.mark.parametrize("place", ["target/model.onnx.data", "target", "text"])
def test_a_symbolic_link_is_refused(bundle, place):
    """Even one to the right content: it may point elsewhere tomorrow."""
    outside = bundle.parent / "outside"
    (bundle / place).rename(outside)
    (bundle / place).symlink_to(outside)
    with pytest.raises(IntegrityError, match="symbolic link"):
        open_bundle(bundle)


def test_a_directory_in_place_of_a_file_is_refused(bundle):
    (bundle / "target" / "model.onnx").unlink()
    (bundle / "target" / "model.onnx").mkdir()
    with pytest.raises(IntegrityError):
        open_bundle(bundle)


def test_a_file_the_manifest_uses_and_does_not_list_is_refused(bundle):
    change_manifest(bundle, lambda manifest: manifest["files"].pop("target/model.onnx"))
    with pytest.raises(IntegrityError, match="does not list it"):
        open_runtime(bundle, memory=VerifiedFiles(None))


@pytest.mark.parametrize("place", ["target/model.onnx", "sampling/accept_greedy.5.onnx"])
def test_weights_from_outside_are_refused(bundle, place):
    """A graph that is listed and hashed as it is, and reads its weights from somewhere else."""
    import onnx

    file = bundle / place
    model = onnx.load(file, load_external_data=False)
    weight = onnx.TensorProto(name="w", data_type=onnx.TensorProto.FLOAT, dims=[1])
    weight.data_location = onnx.TensorProto.EXTERNAL
    weight.external_data.add(key="location", value="../../secret")
    model.graph.initializer.append(weight)
    onnx.save(model, file)
    entry = {"sha256": hash_file(file), "bytes": file.stat().st_size}
    change_manifest(bundle, lambda manifest: manifest["files"].update({place: entry}))
    with pytest.raises(IntegrityError, match="secret"):
        open_bundle(bundle)


def test_a_directory_that_is_no_bundle_is_refused(tmp_path, tiny_pair_exported):
    for path in (tmp_path / "nothing", tmp_path, tiny_pair_exported):
        with pytest.raises(IntegrityError, match="is not a bundle"):
            open_bundle(path)


# --- the manifest --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(schema=2), "schema version 2; this version of spec-export reads 1"),
        (lambda m: m.pop("schema"), "schema version None"),
        (lambda m: m.pop("gamma"), "the key 'gamma' is missing"),
        (lambda m: m.update(extra=1), "unknown key 'extra'"),
        (lambda m: m.update(gamma="4"), "manifest.json.gamma: expected int, found str"),
        (lambda m: m.update(gamma=4.0), "gamma: expected int, found float"),
        (lambda m: m.update(method="magic"), "'magic' is none of"),
        (lambda m: m["device"].update(threads=None), "device.threads: expected int, found null"),
        (lambda m: m["exactness"].update(kind="exact"), "'exact' is none of"),
        (lambda m: m["files"].update(x=1), "files.x: expected dict"),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(bundle, change, message):
    change_manifest(bundle, change)
    with pytest.raises(SchemaError, match=message):
        open_bundle(bundle)


def test_text_that_json_allows_and_we_do_not_is_refused(bundle):
    file = bundle / MANIFEST_FILE
    text = file.read_text(encoding="utf-8")
    for bad in (
        text.replace('"gamma":', '"gamma": 9, "gamma":', 1),
        text.replace('"worst_logit": ', '"worst_logit": NaN, "x": ', 1),
        text.replace('"worst_logit": ', '"worst_logit": 1e999, "x": ', 1),
        text + "x",
        text[: len(text) // 2],
    ):
        assert bad != text
        file.write_text(bad, encoding="utf-8")
        with pytest.raises(SchemaError, match="not valid JSON"):
            open_bundle(bundle)
    file.write_bytes(b"{" + b" " * (17 << 20) + b"}")
    with pytest.raises(IntegrityError, match="at most"):
        open_bundle(bundle)


def leaves(value: Any, path: Path_ = ()) -> list[Path_]:
    if isinstance(value, dict):
        return [leaf for key, item in value.items() for leaf in leaves(item, (*path, key))]
    if isinstance(value, list):
        return [leaf for i, item in enumerate(value) for leaf in leaves(item, (*path, i))]
    return [path]


def other_values(value: Any) -> list[Any]:
    """Values of the same type, or of one that is allowed in its place."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [0, -1, value + 1, 10**12]
    if isinstance(value, str):
        return ["", "x", value + "x"]
    return [None, 1, ""]


def value_at(manifest: Any, path: Path_) -> Any:
    for key in path:
        manifest = manifest[key]
    return manifest


def put(manifest: dict[str, Any], path: Path_, value: Any) -> Any:
    """Put a value at a place; returns what was there."""
    holder: Any = manifest
    for key in path[:-1]:
        holder = holder[key]
    before, holder[path[-1]] = holder[path[-1]], value
    return before


def used(bundle: Path, memory: VerifiedFiles) -> None:
    """Open it and decode, with and without randomness."""
    session = Session(open_runtime(bundle, memory=memory))
    for temperature in (0.0, 1.0):
        request = Request(max_tokens=6, sampling=Sampling(temperature))
        list(generate(session, [5, 6, 7], request))


def test_no_altered_manifest_gets_past_our_own_errors(bundle):
    """A value is changed to another of its type: refused with an error of ours, or used.

    A manifest is not signed, so someone may write what they like into it; that may make a bundle
    that runs otherwise, never a stray exception, a hang or a claim on all memory. All 4000 changes
    were tried once, in three minutes; here is a sample, half of it from what a round's shapes hang
    on. Before the parts were held against one another, a changed digit ended in KeyError or
    MemoryError.
    """
    file, memory = bundle / MANIFEST_FILE, VerifiedFiles(None)
    manifest = json.loads(file.read_text(encoding="utf-8"))
    shapes, others = [], []
    for path in leaves(manifest):
        if path[0] not in ("producer", "source", "parity", "created", "lowered"):
            alternatives = other_values(value_at(manifest, path))
            is_shape = len(path) == 1 or "roles" in path
            (shapes if is_shape else others).extend((path, value) for value in alternatives)
    refused = 0
    chance = random.Random(1)
    for path, value in chance.sample(shapes, 40) + chance.sample(others, 40):
        before = put(manifest, path, value)
        file.write_text(json.dumps(manifest), encoding="utf-8")
        try:
            used(bundle, memory)
        except SpecExportError:
            refused += 1
        put(manifest, path, before)
    assert 40 <= refused < 80


def test_a_model_that_is_missing_or_too_many_is_refused(bundle):
    for change in (
        lambda m: m["models"].pop("target"),
        lambda m: m["models"].pop("draft"),
        lambda m: m["models"].update(third=m["models"]["draft"]),
        lambda m: m.update(method="ngram"),
        lambda m: m["sampling"].pop("accept_dense.5"),
        lambda m: m["models"]["target"]["roles"].pop(),
        lambda m: m["models"]["target"]["states"].pop(),
        lambda m: m["models"]["target"]["inputs"].pop(0),
        lambda m: m["models"]["target"]["outputs"].pop(),
    ):
        saved = (bundle / MANIFEST_FILE).read_bytes()
        change_manifest(bundle, change)
        with pytest.raises(SchemaError, match="it was altered, or made by something else"):
            open_bundle(bundle)
        (bundle / MANIFEST_FILE).write_bytes(saved)


def test_a_chat_template_that_is_no_text_is_refused(bundle):
    change_manifest(bundle, lambda m: m["text"].update(chat_template="target/model.onnx.data"))
    with pytest.raises(BundleError, match="not a chat template"):
        open_runtime(bundle, memory=VerifiedFiles(None))


# --- what was verified before --------------------------------------------------------------------


@pytest.fixture
def hashed(monkeypatch) -> list[str]:
    """Names of the files that are read to be hashed."""
    names: list[str] = []
    original = bundles.hash_file

    def counting(path, *args):
        names.append(path.name)
        return original(path, *args)

    monkeypatch.setattr(bundles, "hash_file", counting)
    return names


def test_contents_are_hashed_once_as_they_lie_on_disk(bundle, tmp_path, hashed):
    memory_file = tmp_path / "cache" / "verified.json"
    open_bundle(bundle, VerifiedFiles(memory_file))
    assert len(hashed) == len(listed(bundle)) + 1
    hashed.clear()
    open_bundle(bundle, VerifiedFiles(memory_file))
    assert hashed == [MANIFEST_FILE]
    hashed.clear()
    open_bundle(bundle)
    assert len(hashed) == len(listed(bundle)) + 1


def test_a_changed_file_is_hashed_again_even_under_its_old_times(bundle, tmp_path, hashed):
    """Size, inode and modification time put back as they were: the change time gives it away."""
    memory_file = tmp_path / "verified.json"
    open_bundle(bundle, VerifiedFiles(memory_file))
    file = bundle / "target" / "model.onnx.data"
    before = file.stat()
    with file.open("r+b") as content:
        first = content.read(1)
        content.seek(0)
        content.write(bytes([first[0] ^ 1]))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_ino) == (before.st_size, before.st_ino)
    with pytest.raises(IntegrityError, match="was altered"):
        open_bundle(bundle, VerifiedFiles(memory_file))


@pytest.mark.parametrize("content", ["", "[]", "1", '{"a": 1}', "\0"])
def test_a_spoiled_memory_costs_hashing_and_nothing_else(bundle, tmp_path, hashed, content):
    memory_file = tmp_path / "verified.json"
    memory_file.write_text(content)
    open_bundle(bundle, VerifiedFiles(memory_file))
    assert len(hashed) == len(listed(bundle)) + 1


def test_a_memory_that_cannot_be_written_is_no_error(bundle, tmp_path):
    (tmp_path / "file").write_text("")
    open_bundle(bundle, VerifiedFiles(tmp_path / "file" / "verified.json"))


# --- an exported directory -----------------------------------------------------------------------


@pytest.fixture
def exported(tiny_pair_exported, tmp_path) -> Path:
    """An exported directory that may be harmed."""
    return Path(shutil.copytree(tiny_pair_exported, tmp_path / "exported"))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda g: g.update(schema=9), SchemaError),
        (lambda g: g.pop("opset"), SchemaError),
        (lambda g: g["models"].pop("target"), SchemaError),
        (lambda g: g["models"].pop("draft"), SchemaError),
        (lambda g: g["models"]["target"]["roles"].pop(), SchemaError),
        (lambda g: g["models"]["target"]["states"][0].update(length_axis=1), SchemaError),
        (lambda g: g["models"]["target"]["states"][0].update(dims=[1, 4, 160, 32]), SchemaError),
        (lambda g: g["models"]["target"].update(vocabulary=10**12), SchemaError),
        (lambda g: g["sampling"].pop("accept_dense"), SchemaError),
        (lambda g: g["models"]["target"].update(file="../model.onnx"), IntegrityError),
        (lambda g: g["models"]["target"].update(file="/etc/passwd"), IntegrityError),
        (lambda g: g["models"]["target"].update(file="nothing.onnx"), IntegrityError),
        (lambda g: g["models"]["target"].update(file="target/model.onnx.data"), IntegrityError),
    ],
)
def test_a_harmed_exported_directory_is_refused_and_nothing_is_built(
    exported, tmp_path, change, error
):
    file = exported / GRAPHS_FILE
    graphs = json.loads(file.read_text(encoding="utf-8"))
    change(graphs)
    file.write_text(json.dumps(graphs), encoding="utf-8")
    with pytest.raises(error):
        build_bundle(exported, tmp_path / "out" / "bundle", OrtBackend())
    assert not (tmp_path / "out").exists()


def test_a_directory_without_a_description_is_named(tmp_path):
    with pytest.raises(IntegrityError, match=r"not an exported directory.*spec-export export"):
        read_exported(tmp_path)


@pytest.mark.parametrize("harm", ["altered", "cut", "gone", "unlisted", "unlisted weights"])
def test_an_exported_directory_that_was_harmed_on_its_way_is_not_built(exported, tmp_path, harm):
    """Zeroed weights were built and certified, with the parity of the ones that were checked."""
    file = exported / "target" / "model.onnx.data"
    if harm == "altered":
        with file.open("r+b") as weights:
            weights.seek(file.stat().st_size // 4)
            weights.write(bytes(1000))
    elif harm == "cut":
        os.truncate(file, file.stat().st_size - 4096)
    elif harm == "gone":
        file.unlink()
    else:
        described = exported / GRAPHS_FILE
        graphs = json.loads(described.read_text(encoding="utf-8"))
        del graphs["files"]["target/model.onnx" + ".data" * harm.endswith("weights")]
        described.write_text(json.dumps(graphs), encoding="utf-8")
    options = BuildOptions(max_len=64, chunk=16)
    with pytest.raises(IntegrityError):
        build_bundle(exported, tmp_path / "out" / "bundle", OrtBackend(), options)
    assert not (tmp_path / "out").exists()
