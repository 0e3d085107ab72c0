"""The table of Megatron's flags: complete, with a reason for each that has no effect."""

import csv
import random
import sys

import pytest

from tests.support import ROOT

FOLDER = ROOT / "scripts" / "studies"
pytestmark = pytest.mark.long  # a study
TABLE = FOLDER / "verify_flags.csv"
RELEASES = ("0.16.1", "0.19.2")
KINDS = {"", "effect", "layout", "stand-in", "none", "refused"}


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


@pytest.mark.parametrize("release", RELEASES)
def test_the_table_has_every_flag_of_the_parser_and_ten_drawn_ones_are_as_it_says(release):
    checkout = ROOT / ".cache" / f"Megatron-LM-core_v{release}"
    if not checkout.is_dir():
        pytest.skip(f"no checkout of Megatron-LM in {checkout.name}")
    sys.path.insert(0, str(FOLDER))
    try:
        from flag_outcomes import flags_of, outcomes
    finally:
        sys.path.remove(str(FOLDER))
    rows = _rows()
    listed = {flag for flag, row in rows.items() if row[release]}
    assert listed == set(flags_of(checkout))
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed: {seed}")
    drawn = random.Random(seed).sample(sorted(listed), 10)
    for flag, (kind, _) in outcomes(checkout, drawn).items():
        assert kind.partition(":")[0] == rows[flag][release], flag
