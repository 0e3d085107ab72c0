"""A fetched file has the digest that is written down, and is in .cache whole or not at all."""

import hashlib
import runpy
import sys
import zipfile
from functools import partial

import pytest

from compat.megatron.releases import PUBLISHED
from tests.scripts.test_torch_lines import LINES
from tests.support import ROOT, script_module

INFO = "other-1.0.dist-info"
FILES = {
    "other/kept.py": "x = 1",
    f"{INFO}/METADATA": "Metadata-Version: 2.1\nName: other\nVersion: 1.0\n",
    f"{INFO}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    f"{INFO}/RECORD": "",
}


@pytest.fixture
def fetching(tmp_path, monkeypatch):
    """The module, with a cache of its own and one wheel that pip finds without an index."""
    module = script_module("fetching.py")
    monkeypatch.setattr(module, "CACHE", tmp_path / "cache")
    (tmp_path / "wheels").mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    with zipfile.ZipFile(tmp_path / "wheels" / "other-1.0-py3-none-any.whl", "w") as wheel:
        for name, text in FILES.items():
            wheel.writestr(name, text)
    return module


def test_an_archive_of_another_digest_is_refused_and_nothing_is_left(fetching, tmp_path):
    with pytest.raises(SystemExit, match=r"cannot fetch other==1\.0: ERROR.*HASHES"):
        fetching.keep("other-1.0", "other==1.0", "0" * 64, r"other/(\w+\.py)", [])
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_folder_that_lacks_what_is_kept_now_is_fetched_again(fetching, tmp_path):
    (wheel,) = (tmp_path / "wheels").iterdir()
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    folder = tmp_path / "cache" / "other-1.0"
    (folder / "more").mkdir(parents=True)
    fetch = partial(fetching.keep, "other-1.0", "other==1.0", digest, r"(other/\w+\.py)", [])
    fetch(whole_with="more")
    assert not (folder / "other").exists()
    fetch(whole_with="other")
    assert (folder / "other" / "kept.py").read_text() == FILES["other/kept.py"]
    assert not (folder / "more").exists()


def test_every_release_that_the_tests_read_has_a_digest(fetching, monkeypatch):
    monkeypatch.setitem(sys.modules, "fetching", fetching)
    megatron = runpy.run_path(str(ROOT / "scripts" / "fetch_megatron"))
    assert set(megatron["WHEELS"]) == set(PUBLISHED)
    torch_lines = runpy.run_path(str(ROOT / "scripts" / "torch_lines"))
    assert list(torch_lines["WHEELS"]) == LINES
    with pytest.raises(SystemExit, match=r"no sha256 of megatron-core 9\.9\.9 is known"):
        megatron["fetch"]("9.9.9")
