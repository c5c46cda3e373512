"""What is on this machine, what is missing and how to get it, and what this product can do here."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from spec_export.console import print_rows, size
from spec_export.machine import Facts, Library, at_least, look
from spec_export.system import Gpu, System

Rows = list[tuple[str, str]]
_JETPACK = (7, 2, 2)
_TENSORRT_11 = "TensorRT 11.4.1 or later, NVIDIA's package for Linux on Arm (SBSA)"
_NEEDS_JETPACK = (
    f"TensorRT 10.15 or later is needed. JetPack 6.2 has 10.3 and JetPack 7.1 has 10.13; install "
    f"JetPack 7.2.2 or later and, on it, {_TENSORRT_11}"
)
_EXPORT = ("torch", "transformers", "onnx", "onnx-ir", "onnxscript")
_BUILD = ("onnx", "onnx-ir")


@dataclass(frozen=True)
class Ability:
    """Something this product does.

    Attributes:
        name: such as `run on tensorrt`.
        can: whether it does it here.
        detail: for what, or what is missing and how to get it.
    """

    name: str
    can: bool
    detail: str


def doctor(*, as_json: bool, system: System | None = None) -> None:
    """Look at this machine and print what was found."""
    facts = look(system or System())
    abilities = judge(facts)
    if as_json:
        shown: dict[str, Any] = {
            "machine": dataclasses.asdict(facts),
            "abilities": [dataclasses.asdict(ability) for ability in abilities],
        }
        print(json.dumps(shown, ensure_ascii=False, allow_nan=False), flush=True)
    else:
        print_rows([*fact_rows(facts), *ability_rows(abilities)])


def judge(facts: Facts) -> list[Ability]:
    """What can be done on a machine."""
    return [
        _export(facts),
        _build_on_processor(facts),
        _run_on_processor(facts),
        *_tensorrt(facts, "tensorrt"),
        *_tensorrt(facts, "tensorrt-rtx"),
        _run_on_cuda(facts),
    ]


# --- judging --------------------------------------------------------------------------------------


def _export(facts: Facts) -> Ability:
    if missing := _missing(facts, _EXPORT):
        return Ability("export", False, _installable(missing, "export"))
    return Ability("export", True, "checkpoints to portable ONNX")


def _build_on_processor(facts: Facts) -> Ability:
    name, missing = "build for onnxruntime", _missing(facts, ("onnxruntime", *_BUILD))
    if missing:
        return Ability(name, False, _installable(missing, "build"))
    return Ability(name, True, f"for {facts.processor}, {facts.threads} threads")


def _run_on_processor(facts: Facts) -> Ability:
    name, missing = "run on onnxruntime", _missing(facts, ("onnxruntime",))
    if missing:
        return Ability(name, False, _installable(missing, "ort"))
    return Ability(name, True, f"on {facts.processor}, {facts.threads} threads")


def _tensorrt(facts: Facts, name: str) -> tuple[Ability, Ability]:
    """Building for a TensorRT library, and running on it."""
    library, build, run = facts.tensorrt[name], f"build for {name}", f"run on {name}"
    if library.version is None:
        detail = _no_library(facts, name, library)
        return Ability(build, False, detail), Ability(run, False, detail)
    return _build(facts, build, library), _run(facts, run, library)


def _build(facts: Facts, name: str, library: Library) -> Ability:
    if missing := _missing(facts, _BUILD):
        return Ability(name, False, _installable(missing, "build"))
    if library.targets:
        return Ability(
            name, True, f"for compute capability {', '.join(library.targets)}, without a GPU too"
        )
    if not facts.usable_gpu:
        return Ability(name, False, f"it builds for the GPU at hand: {facts.gpu_reason}")
    return Ability(name, True, f"for {_gpu(facts)}")


def _run(facts: Facts, name: str, library: Library) -> Ability:
    if not facts.usable_gpu or facts.gpu is None:
        return Ability(name, False, facts.gpu_reason)
    capability = facts.gpu.compute_capability
    if library.targets and capability not in library.targets:
        return Ability(
            name,
            False,
            f"{_gpu(facts)} is not served; it serves {', '.join(library.targets)}. Use tensorrt "
            "or onnxruntime-cuda",
        )
    return Ability(name, True, f"on {_gpu(facts)}")


def _run_on_cuda(facts: Facts) -> Ability:
    name = "build for and run on onnxruntime-cuda"
    if "onnxruntime" in facts.packages and "CUDAExecutionProvider" not in facts.providers:
        where = "NVIDIA builds it for Jetson" if facts.board else "pip install onnxruntime-gpu"
        return Ability(name, False, f"the installed onnxruntime has no CUDA provider: {where}")
    if missing := _missing(facts, ("onnxruntime", *_BUILD)):
        return Ability(name, False, _installable(missing, "build"))
    if not facts.usable_gpu:
        return Ability(name, False, facts.gpu_reason)
    return Ability(name, True, f"on {_gpu(facts)}")


def _no_library(facts: Facts, name: str, library: Library) -> str:
    if name == "tensorrt-rtx":
        if facts.board or facts.machine != "x86_64":
            return "tensorrt-rtx is for x86-64; here it is tensorrt"
        return library.reason or "it could not be asked"
    if facts.board and not at_least(facts.jetpack or "", _JETPACK):
        return f"JetPack {facts.jetpack or 'of unknown version'} was found; {_NEEDS_JETPACK}"
    if facts.board:
        return (
            f"JetPack {facts.jetpack} can have it, and this Python does not see it: install "
            f"{_TENSORRT_11}, with its Python part, and make the virtual environment with "
            "--system-site-packages"
        )
    return library.reason or "it could not be asked"


def _missing(facts: Facts, names: tuple[str, ...]) -> list[str]:
    return [name for name in names if name not in facts.packages]


def _installable(missing: list[str], extra: str) -> str:
    verb = "is" if len(missing) == 1 else "are"
    return f"{', '.join(missing)} {verb} not installed: pip install '.[{extra}]' in a clone"


def _gpu(facts: Facts) -> str:
    return "no GPU" if facts.gpu is None else _described(facts.gpu)


def _described(gpu: Gpu) -> str:
    return f"{gpu.name}, compute capability {gpu.compute_capability}"


# --- showing --------------------------------------------------------------------------------------


def fact_rows(facts: Facts) -> Rows:
    """What was found, a line each; what is not there is left out."""
    shown: Rows = [
        ("processor", f"{facts.processor} ({facts.machine}), {facts.threads} threads"),
        ("memory", ", ".join(f"{size(n)} {name}" for name, n in facts.memory.items()) or "unknown"),
    ]
    if facts.board:
        shown.append(("board", f"{facts.board}, JetPack {facts.jetpack or 'of unknown version'}"))
        shown.append(("power mode", facts.power_mode or "unknown: nvpmodel -q as root tells it"))
    for number, gpu in enumerate(facts.gpus):
        memory = f", {size(gpu.memory_bytes)}" if gpu.memory_bytes else ""
        shown.append((f"GPU {number}", f"{_described(gpu)}{memory}"))
    if not facts.usable_gpu:
        shown.append(("CUDA", facts.gpu_reason))
    if facts.driver or (facts.gpu and facts.gpu.driver):
        serves = f"serves CUDA {facts.gpu.driver}" if facts.gpu and facts.gpu.driver else ""
        shown.append(("driver", ", ".join(filter(None, (facts.driver, serves)))))
    if facts.clocks:
        shown.append(("clocks", ", ".join(f"{name} {at}" for name, at in facts.clocks.items())))
    for name in ("tensorrt", "tensorrt-rtx"):
        found = facts.tensorrt[name].version
        shown.append((name, found or f"not usable: {facts.tensorrt[name].reason or 'unknown'}"))
    shown.append(("onnxruntime", _onnxruntime(facts)))
    for name in ("cuda-python", "onnx", "onnx-ir", "torch", "transformers"):
        shown.append((name, facts.packages.get(name, "not installed")))
    shown += [("not known", f"{what}: {fault}") for what, fault in facts.unknown.items()]
    return shown


def _onnxruntime(facts: Facts) -> str:
    found = facts.packages.get("onnxruntime")
    if found is None:
        return "not installed"
    names = [provider.removesuffix("ExecutionProvider") for provider in facts.providers]
    return f"{found}, providers {', '.join(names) or 'unknown'}"


def ability_rows(abilities: list[Ability]) -> Rows:
    """What can be done here, and what is missing for the rest."""
    return [
        (ability.name, f"{'yes' if ability.can else 'no'}: {ability.detail}")
        for ability in abilities
    ]
