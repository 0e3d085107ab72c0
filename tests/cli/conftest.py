"""Plans in files."""

import json

import pytest


@pytest.fixture
def saved(tmp_path):
    """Writes a plan to a file; the option that reads it."""

    def save(plan):
        path = tmp_path / "plan.json"
        path.write_text(plan if isinstance(plan, str) else json.dumps(plan))
        return f"--plan {path}"

    return save
