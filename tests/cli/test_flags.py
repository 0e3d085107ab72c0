"""The flags of programs, and those of the commands."""

from torch.distributed.run import get_args_parser

from compat.launch import CHOICES, SWITCHES
from compat.planned.flags import flags_of

OF_NEWER_TORCH = {
    "numa-binding",
    "shutdown-timeout",
    "virtual-local-rank",
    "signals-to-handle",
    "duplicate-stdout-filters",
    "duplicate-stderr-filters",
}


def test_the_list_of_torchruns_flags_is_that_of_its_parser():
    rows = dict(flags_of("torchrun"))
    known = {name for name in rows if not name.startswith("$")} - {"use-env"}
    parsed = set()
    for action in get_args_parser()._actions:
        names = {option.lstrip("-").replace("_", "-") for option in action.option_strings}
        for name in names - {"h", "help"}:
            parsed.add(name)
            assert rows[name].values == ("0" if action.nargs == 0 else "1"), name
    assert parsed <= known <= parsed | OF_NEWER_TORCH


def test_the_list_of_our_launchers_flags_is_that_of_its_parser():
    flags = {name for name in flags_of("ours") if not name.startswith("$")}
    assert flags == {"order", "m", "audit", "timeout", *CHOICES, *SWITCHES}
