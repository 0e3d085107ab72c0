"""Pages that repeat what the code or another page says: variables, messages, figures, jobs."""

import ast
import re

import pytest

import hypergrid
from compat.cli.launch import job_of
from compat.cli.run import launches
from hypergrid.policy import CHOICES
from tests.support import ROOT, pages

DOCS = {page.name: page.read_text() for page in sorted((ROOT / "docs").glob("*.md"))}
SOURCES = {
    str(file.relative_to(ROOT)): file.read_text()
    for top in ("hypergrid", "compat")
    for file in sorted((ROOT / top).rglob("*.py"))
}


def cells(page):
    """The rows of all tables of a page, without their headings."""
    lines = [line for line in DOCS[page].splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_the_page_of_variables_has_each_that_the_code_names_and_no_other():
    named = {name for text in SOURCES.values() for name in re.findall(r"HYPERGRID_\w*\w", text)}
    named |= {f"HYPERGRID_{choice.upper()}" for choice in CHOICES}
    assert [row[0].strip("|` ") for row in cells("variables.md")] == sorted(named - {"HYPERGRID_"})


@pytest.mark.parametrize("choice", CHOICES)
def test_the_variable_of_a_choice_has_the_values_of_the_choice(choice):
    values_of = {name.strip("|` "): values for name, values, _ in cells("variables.md")}
    values = values_of[f"HYPERGRID_{choice.upper()}"]
    assert re.findall(r"`(\w+)`", values) == list(CHOICES[choice])


def texts():
    """Every text in the code, with ``{}`` where a value is put in."""
    for source in SOURCES.values():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.JoinedStr):
                text = ""
                for part in node.values:
                    text += part.value if isinstance(part, ast.Constant) else "{}"
                yield text
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


TEXTS = "\0".join(texts())
MESSAGES = [re.match(r"\|? ?`(.+)`$", row[0])[1] for row in cells("troubleshooting.md")]


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_of_the_troubleshooting_page_is_in_the_code(message):
    pieces = [re.escape(piece.strip()) for piece in re.split(r"\.\.\.|\(\.\.\.\)", message)]
    assert re.search(r"[^\0]{0,200}?".join(pieces), TEXTS)


@pytest.mark.parametrize("where", ["SLURM", "Kubernetes"])
def test_the_first_job_starts_sixteen_ranks_with_tp_4_and_pp_2(where, tmp_path):
    blocks = pages.blocks(ROOT / "docs" / "first-job.md")
    text = blocks[["SLURM", "Kubernetes"].index(where)].text
    if where == "Kubernetes":
        yaml = pytest.importorskip("yaml")
        _, job = yaml.safe_load_all(text)
        (text,) = job["spec"]["template"]["spec"]["containers"][0]["args"]
    else:
        assert text == (ROOT / "scripts" / "examples" / "job.sh").read_text()
    script = tmp_path / "job.sh"
    script.write_text(text)
    (command,) = launches(script, [], 60).launches
    job = job_of(command)
    assert (job.world_size, job.ranks_per_host) == (16, 8)
    assert job.arguments == {"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 2}
    assert not job.flags["not read"]


def test_the_citation_names_this_version():
    assert f"version: {hypergrid.__version__}\n" in (ROOT / "CITATION.cff").read_text()
