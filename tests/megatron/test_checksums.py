"""The files of published releases are known by their checksum: what follows is as if read."""

import inspect
import json

import pytest

from compat.megatron import installed
from compat.megatron.releases import CHECKSUMS, PUBLISHED
from tests.support import warm
from tests.support.stock import following, have_stock, source

FILES = ("parallel_state.py", "hyper_comm_grid.py", "package_info.py")


def surface():
    """What this process offers for the release that it follows, and whether a source was read."""
    from compat import hyper_comm_grid, parallel_state
    from compat.megatron import releases
    from compat.megatron.request import Request
    from compat.swap import REPLACEMENTS, drift

    names = {}
    for module in (parallel_state, hyper_comm_grid):
        for name, value in vars(module).items():
            if inspect.isfunction(value):
                names[name] = str(inspect.signature(value))
            elif inspect.isclass(value):
                names[name] = ", ".join(dir(value))
            elif not name.startswith("__"):
                names[name] = type(value).__name__
    refusals = {}
    for argument in ("gtp_remat_size", "rank_offset", "hybrid_context_parallel", "unknown"):
        try:
            parallel_state.initialize_model_parallel(**{argument: 1})
        except Exception as error:
            refusals[argument] = repr(error)
    return {
        "read": releases.SOURCE is not None,
        "names": names,
        "refusals": refusals,
        "release": str(releases.RELEASE),
        "facts": releases.RELEASE_HAS,
        "defaults": {name: repr(value) for name, value in vars(Request).items() if name[0] != "_"},
        "differences": [drift.refuse_drift(module) for module in REPLACEMENTS],
    }


def surface_of(folder, release):
    code = "from tests.megatron.test_checksums import *; print(json.dumps(surface()))"
    paths = {"PYTHONPATH": f"{folder}:{following(release)['PYTHONPATH']}"}
    done = warm.run("-c", code, **{**following(release), **paths})
    assert done.returncode == 0, done.stderr
    offered = json.loads(done.stdout)
    functions = {name: text for name, text in offered["defaults"].items() if " at 0x" not in text}
    return {**offered, "defaults": functions}


@pytest.mark.parametrize("release", PUBLISHED)
def test_a_known_file_gives_the_module_that_reading_it_gives(release, tmp_path):
    if not have_stock(release):
        pytest.skip(f"run scripts/fetch_megatron {release}")
    offered = {}
    for kind, line in (("known", ""), ("changed", "# another checksum\n")):
        core = tmp_path / kind / "megatron" / "core"
        core.mkdir(parents=True)
        (core / "__init__.py").touch()
        for file in FILES:
            (core / file).write_text(source(release, file) + line)
        assert (installed.checksum(core) in CHECKSUMS) == (kind == "known")
        offered[kind] = surface_of(tmp_path / kind, release)
    assert offered["known"].pop("read") is False
    assert offered["changed"].pop("read") is True
    assert offered["known"] == offered["changed"]
