"""The table of Megatron's flags: complete, with a reason for each that has no effect."""

import csv
import random
import sys
from datetime import date
from pathlib import Path

import pytest

from compat.verification.layout import SIZES
from tests.support import ROOT

FOLDER = ROOT / "scripts" / "studies"
pytestmark = pytest.mark.long  # a study
TABLE = FOLDER / "verify_flags.csv"
RELEASES = ("0.16.1", "0.19.2")
KINDS = {"", "effect", "layout", "stand-in", "none", "refused"}


def _checkouts():
    return {release: ROOT / ".cache" / f"Megatron-LM-core_v{release}" for release in RELEASES}


def _rows():
    with TABLE.open(newline="") as file:
        return {row["flag"]: row for row in csv.DictReader(file)}


def test_each_flag_has_an_effect_or_a_reason():
    rows = _rows()
    assert len(rows) > 500
    for flag, row in rows.items():
        kinds = {row[release] for release in RELEASES}
        assert kinds <= KINDS, flag
        assert kinds != {""}, flag
        if kinds & {"none", "refused"}:
            assert row["reason"], f"{flag} has neither an effect nor a reason"
    for name in SIZES.values():
        flag = "--" + name.replace("_", "-")
        if flag in rows:
            assert rows[flag]["0.16.1"] in ("layout", "refused"), flag


@pytest.mark.parametrize("release", RELEASES)
def test_the_table_has_every_flag_of_the_parser_and_ten_of_today_are_as_it_says(release):
    checkout = _checkouts()[release]
    if not Path(checkout).is_dir():
        pytest.skip(f"no checkout of Megatron-LM in {checkout.name}")
    sys.path.insert(0, str(FOLDER))
    try:
        from flag_outcomes import flags_of, outcomes
    finally:
        sys.path.remove(str(FOLDER))
    rows = _rows()
    listed = {flag for flag, row in rows.items() if row[release]}
    assert listed == set(flags_of(checkout))
    drawn = random.Random(date.today().toordinal()).sample(sorted(listed), 10)
    for flag, (kind, _) in outcomes(checkout, drawn).items():
        assert kind.partition(":")[0] == rows[flag][release], flag
