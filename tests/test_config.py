"""The `config.json` of a checkpoint, as it may lie on a disk or on the hub."""

import json
import os
import subprocess
import sys

import pytest

import tp_layers
from fake_hub import FakeHub
from toy import PLAN, Toy, save_toy
from tp_layers.group import Group
from tp_layers.loader.folder import read_config

CONFIG = {"_class_name": "Toy", "_name_or_path": "b\u00fcro \u65e5\u672c"}
ENCODINGS = ["utf-8", "utf-8-sig", "utf-16"]


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_config_is_read_whatever_the_locale(tmp_path, encoding):
    (tmp_path / "config.json").write_bytes(json.dumps(CONFIG, ensure_ascii=False).encode(encoding))
    code = (
        "import locale, pathlib, sys; from tp_layers.loader.folder import read_config; "
        "assert locale.getpreferredencoding(False).lower() not in ('utf-8', 'utf8'); "
        "print(ascii(read_config(pathlib.Path(sys.argv[1]))))"
    )
    plain = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run([sys.executable, "-c", code, tmp_path], env=plain, check=True, capture_output=True, text=True)
    assert done.stdout.strip() == ascii(CONFIG) and read_config(tmp_path) == CONFIG


STRANGE = {
    "a number": ("7", "it holds a int"),
    "null": ("null", "it holds a NoneType"),
    "no JSON": ("{", "is not JSON"),
    "JSON that is too deep": ("[" * 100_000, "is not JSON"),
}


@pytest.mark.parametrize("strange", STRANGE)
def test_what_is_no_config_is_refused_on_the_hub_too(tmp_path, monkeypatch, strange):
    text, message = STRANGE[strange]
    (tmp_path / "there").mkdir()
    save_toy(tmp_path / "there")
    (tmp_path / "there" / "config.json").write_text(text)
    hub = FakeHub(monkeypatch, tmp_path / "there", tmp_path / "cache")
    for path in (tmp_path / "there", "owner/name"):
        with pytest.raises(ValueError, match=message):
            tp_layers.load(Toy, path, plan=PLAN, group=Group())
    assert "generation_config.json" not in hub.asked
