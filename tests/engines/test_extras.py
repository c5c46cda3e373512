import subprocess
import sys

import pytest

from spec_export.engines.errors import MissingExtra, SpecExportError
from spec_export.engines.extras import require


def test_installed_modules_pass_silently():
    require("ort", "json", "sys")
    require("ort")


def test_a_missing_module_names_itself_the_extra_and_the_command():
    with pytest.raises(MissingExtra) as caught:
        require("build", "json", "no_such_module_a")
    message = str(caught.value)
    assert "no_such_module_a is not installed" in message
    assert "[build]" in message
    assert "pip install '.[build]'" in message
    assert "json" not in message
    assert isinstance(caught.value, SpecExportError)


def test_all_missing_modules_are_named_at_once():
    with pytest.raises(MissingExtra, match="no_such_module_a and no_such_module_b are not"):
        require("export", "no_such_module_a", "json", "no_such_module_b")


def test_a_module_whose_import_is_blocked_counts_as_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "wave", None)
    with pytest.raises(MissingExtra, match="wave"):
        require("export", "wave")


def test_an_imported_module_without_a_spec_counts_as_installed(monkeypatch):
    monkeypatch.setattr(pytest, "__spec__", None)
    require("dev", "pytest")


def test_looking_imports_nothing():
    code = (
        "import sys; from spec_export.engines.extras import require; "
        "require('ort', 'wave', 'numpy'); print('wave' in sys.modules, 'numpy' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False", "False"]
