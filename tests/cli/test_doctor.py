"""`spec-export doctor` on machines that are not this one, and on some that are strange."""

from __future__ import annotations

import json

import pytest

from spec_export import doctor as doctor_module
from spec_export.doctor import Ability, doctor, judge
from spec_export.machine import PACKAGES, Facts, at_least, look
from spec_export.system import Gpu, System

NO_GPU = "no NVIDIA driver was found"
MEMORY = "MemTotal:       30697236 kB\nMemAvailable:   20000000 kB\nSwapTotal:             0 kB"
EVERYTHING = {names[0]: "1.0" for names in PACKAGES.values()}
TARGETS = ["7.5", "8.0", "8.6", "8.9", "12.0"]


class FakeSystem(System):
    """A machine made of answers."""

    def __init__(
        self,
        *,
        machine: str = "x86_64",
        processor: str = "AMD EPYC",
        files: dict[str, str] | None = None,
        programs: dict[str, str] | None = None,
        packages: dict[str, str] | None = None,
        gpu: Gpu | str = NO_GPU,
        providers: tuple[str, ...] = ("CPUExecutionProvider",),
        tensorrt: dict[str, tuple[str | None, list[str], str]] | None = None,
    ) -> None:
        self.files, self.programs = {"/proc/meminfo": MEMORY} | (files or {}), programs or {}
        self.packages = EVERYTHING if packages is None else packages
        self.libraries = tensorrt or {}
        self._machine, self._processor, self._gpu = machine, processor, gpu
        self._providers = providers

    def read(self, path):
        return self.files.get(path)

    def run(self, *command):
        return self.programs.get(command[0])

    def package(self, *names):
        return next((self.packages[name] for name in names if name in self.packages), None)

    def cuda_gpus(self):
        return ([], self._gpu) if isinstance(self._gpu, str) else ([self._gpu], "")

    def providers(self):
        return list(self._providers)

    def tensorrt(self, name):
        return self.libraries.get(name, (None, [], f"{name} is not installed"))

    def machine(self):
        return self._machine

    def processor(self):
        return self._processor

    def threads(self):
        return 8


def orin(jetpack: str, release: str, **more: object) -> FakeSystem:
    """A Jetson AGX Orin."""
    return FakeSystem(
        machine="aarch64",
        processor="Cortex-A78AE",
        files={
            "/etc/nv_tegra_release": release,
            "/proc/device-tree/model": "NVIDIA Jetson AGX Orin Developer Kit",
            "/sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq": "2201600",
            "/sys/class/devfreq/17000000.gpu/cur_freq": "1300500000",
        },
        programs={"dpkg-query": jetpack, "nvpmodel": "NV Power Mode: MAXN\n0"},
        gpu=Gpu("Orin", "8.7", "13.0", 64 << 30),
        **more,  # type: ignore[arg-type]
    )


RUNTIME = {"onnxruntime": "1.32.0", "cuda-bindings": "13.0.3", "onnx": "1.23", "onnx-ir": "1.1"}
ORIN_62 = orin(
    "6.2.1+b38",
    "# R36 (release), REVISION: 4.3, GCID: 38968081, BOARD: generic",
    packages=RUNTIME,
    tensorrt={"tensorrt": (None, [], "tensorrt 10.3.0 is too old")},
)
ORIN_72 = orin(
    "7.2.2+b12",
    "# R39 (release), REVISION: 0.0, GCID: 1, BOARD: generic",
    packages=RUNTIME,
    tensorrt={"tensorrt": ("11.4.1", [], "")},
)
DATACENTER = FakeSystem(
    processor="Intel Xeon",
    gpu=Gpu("NVIDIA H200", "9.0", "13.0", 141 << 30),
    programs={"nvidia-smi": "NVIDIA H200, 9.0, 580.65.06, 143771, 345, 1980, 3201"},
    providers=("CUDAExecutionProvider", "CPUExecutionProvider"),
    tensorrt={"tensorrt": ("11.4.0", [], ""), "tensorrt-rtx": ("1.7.1", TARGETS, "")},
)
LAPTOP = FakeSystem(
    processor="Intel Core",
    gpu=Gpu("NVIDIA GeForce RTX 4070 Laptop GPU", "8.9", "13.0", 8 << 30),
    tensorrt={"tensorrt-rtx": ("1.7.1", TARGETS, "")},
)
PROCESSOR_ONLY = FakeSystem(tensorrt={"tensorrt-rtx": ("1.7.1", TARGETS, "")})
BARE = FakeSystem(packages={}, providers=())


def abilities(system: System) -> dict[str, Ability]:
    return {ability.name: ability for ability in judge(look(system))}


def can(system: System) -> set[str]:
    return {name for name, ability in abilities(system).items() if ability.can}


ON_PROCESSOR = {"build for onnxruntime", "run on onnxruntime"}


@pytest.mark.parametrize(
    ("system", "expected"),
    [
        (BARE, set()),
        (PROCESSOR_ONLY, {"export", *ON_PROCESSOR, "build for tensorrt-rtx"}),
        (
            LAPTOP,
            {"export", *ON_PROCESSOR, "build for tensorrt-rtx", "run on tensorrt-rtx"},
        ),
        (
            DATACENTER,
            {
                "export",
                *ON_PROCESSOR,
                "build for tensorrt",
                "run on tensorrt",
                "build for tensorrt-rtx",
                "build for and run on onnxruntime-cuda",
            },
        ),
        (ORIN_62, ON_PROCESSOR),
        (ORIN_72, {*ON_PROCESSOR, "build for tensorrt", "run on tensorrt"}),
    ],
    ids=["bare", "processor", "laptop", "datacenter", "orin 6.2", "orin 7.2"],
)
def test_what_can_be_done_on_each_machine(system, expected):
    assert can(system) == expected


@pytest.mark.parametrize(
    ("system", "ability", "detail"),
    [
        (BARE, "export", "pip install '.[export]'"),
        (
            BARE,
            "run on onnxruntime",
            "onnxruntime is not installed: pip install '.[ort]'",
        ),
        (PROCESSOR_ONLY, "run on tensorrt-rtx", NO_GPU),
        (PROCESSOR_ONLY, "build for tensorrt-rtx", "for compute capability 7.5, 8.0, 8.6, 8.9"),
        (LAPTOP, "run on tensorrt-rtx", "on NVIDIA GeForce RTX 4070 Laptop GPU"),
        (LAPTOP, "run on tensorrt", "tensorrt is not installed"),
        (LAPTOP, "build for and run on onnxruntime-cuda", "pip install onnxruntime-gpu"),
        (DATACENTER, "run on tensorrt-rtx", "capability 9.0 is not served; it serves 7.5"),
        (ORIN_62, "build for tensorrt", "JetPack 6.2.1 was found; TensorRT 10.15 or later"),
        (ORIN_62, "run on tensorrt", "install JetPack 7.2.2 or later and, on it, TensorRT 11.4.1"),
        (ORIN_72, "run on tensorrt", "on Orin, compute capability 8.7"),
        (ORIN_72, "run on tensorrt-rtx", "tensorrt-rtx is for x86-64"),
        (ORIN_72, "build for and run on onnxruntime-cuda", "NVIDIA builds it for Jetson"),
        (ORIN_72, "export", "torch, transformers, onnxscript are not installed"),
    ],
)
def test_each_machine_is_told_what_is_missing_and_how_to_get_it(system, ability, detail):
    assert detail in abilities(system)[ability].detail


def test_a_jetson_whose_python_does_not_see_tensorrt():
    system = orin("7.2.2+b12", "# R39 (release), REVISION: 0.0", packages=RUNTIME)
    assert "--system-site-packages" in abilities(system)["run on tensorrt"].detail


@pytest.mark.parametrize(
    ("package", "release", "expected"),
    [
        ("6.2.1+b38", "# R36 (release), REVISION: 4.3", "6.2.1"),
        ("", "# R36 (release), REVISION: 4.3, GCID: 1", "6.2"),
        ("", "# R35 (release), REVISION: 6.0", "of Jetson Linux 35.6.0"),
        ("", "garbage", None),
    ],
)
def test_jetpack_is_read_from_its_package_or_from_the_release(package, release, expected):
    assert look(orin(package, release)).jetpack == expected


def test_a_jetson_shows_board_power_mode_and_clocks(capsys):
    doctor(as_json=False, system=ORIN_72)
    shown = capsys.readouterr().out
    for text in (
        "NVIDIA Jetson AGX Orin Developer Kit, JetPack 7.2.2",
        "MAXN",
        "processor 2202 MHz, gpu 1300 MHz",
        "Orin, compute capability 8.7",
        "yes: on Orin",
    ):
        assert text in shown


def test_a_gpu_shows_driver_and_clocks():
    facts = look(DATACENTER)
    assert facts.driver == "580.65.06"
    assert facts.clocks == {"gpu": "345 MHz of 1980", "gpu memory": "3201 MHz"}


def test_every_gpu_is_shown(capsys):
    line = "NVIDIA L4, 8.9, 580.65.06, 23034, 300, 2040, 6251"
    doctor(as_json=False, system=FakeSystem(programs={"nvidia-smi": f"{line}\n{line}"}))
    shown = capsys.readouterr().out
    assert "GPU 0" in shown and "GPU 1" in shown and "GPU 2" not in shown


def test_a_gpu_that_cuda_cannot_use_is_shown_all_the_same(capsys):
    """Such as one without cuda-python: the driver's own program sees it."""
    system = FakeSystem(
        gpu="cuda is not installed: pip install '.[cuda]'", programs=DATACENTER.programs
    )
    doctor(as_json=False, system=system)
    shown = capsys.readouterr().out
    assert "NVIDIA H200, compute capability 9.0" in shown
    assert "pip install '.[cuda]'" in shown
    assert "run on tensorrt" not in can(system)


def test_json_holds_the_same(capsys):
    doctor(as_json=True, system=DATACENTER)
    found = json.loads(capsys.readouterr().out)
    assert found["machine"]["gpus"][0]["name"] == "NVIDIA H200"
    assert {a["name"] for a in found["abilities"] if a["can"]} == can(DATACENTER)


class Broken(System):
    """A machine on which every question fails."""

    def __getattribute__(self, name):
        if name.startswith("_"):
            return object.__getattribute__(self, name)
        raise RuntimeError(f"{name} is out of order\nsecond line")


def test_a_machine_where_everything_fails_is_still_shown(capsys):
    doctor(as_json=False, system=Broken())
    shown = capsys.readouterr().out
    assert "RuntimeError: " in shown and "second line" not in shown
    assert "yes: " not in shown


@pytest.mark.parametrize(
    "answer", ["", "No devices were found", "a, b", "\n\n", "N/A," * 7, "é" * 99]
)
def test_whatever_the_programs_print(answer, capsys):
    programs = dict.fromkeys(("nvidia-smi", "nvpmodel", "dpkg-query"), answer)
    files = dict.fromkeys(
        ("/etc/nv_tegra_release", "/proc/device-tree/model", "/proc/meminfo"), answer
    )
    doctor(as_json=False, system=FakeSystem(programs=programs, files=files))
    assert "processor" in capsys.readouterr().out


def test_the_system_takes_no_harm_from_what_is_not_there():
    system = System()
    assert system.read("/no/such/file") is None
    assert system.read("/proc") is None
    assert system.run("/no/such/program") is None
    assert system.run("false") is None
    assert system.package("no-such-distribution") is None


@pytest.mark.parametrize(
    ("found", "wanted", "expected"),
    [
        ("7.2.2", (7, 2), True),
        ("7.2", (7, 2), True),
        ("7.1", (7, 2), False),
        ("10.0", (7, 2), True),
        ("6.2.1+b38", (7, 2), False),
        ("of Jetson Linux 36.4.9", (7, 2), False),
        ("", (7, 2), False),
    ],
)
def test_versions_are_compared_as_numbers(found, wanted, expected):
    assert at_least(found, wanted) is expected


def test_the_command_shows_this_machine(cli):
    called = cli("doctor")
    assert called.code == 0 and "run on onnxruntime" in called.out
    found = json.loads(cli("doctor", "--json").out)
    assert set(found) == {"machine", "abilities"}
    assert isinstance(look(System()), Facts)
    assert doctor_module.fact_rows(look(System()))
