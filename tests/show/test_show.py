"""The page and the picture of a plan: right, complete, usable, and alone."""

import re
import shutil
import sys

import pytest

from hypergrid import GroupPlan, GroupRow, LayoutError, RankLayout, Topology
from hypergrid.show.hosts import ranks_by_host
from hypergrid.show.page import page
from tests.support import ROOT

DECODER = RankLayout(("tp", "cp", "dp", "ep", "pp"), (4, 2, 4, 1, 2))
EXPERT = RankLayout(("tp", "ep", "dp", "pp"), (4, 4, 2, 2))
PLAN = GroupPlan(
    {"decoder": DECODER, "expert": EXPERT, "half": RankLayout(("a", "b"), (8, 4))},
    (
        GroupRow("TENSOR", "decoder", ("tp",)),
        GroupRow("DATA_WITH_CP", "decoder", ("dp", "cp")),
        GroupRow("CHUNKS", "decoder", ("dp", "cp"), chunk=3),
        GroupRow("EMBEDDING", "decoder", ("pp", "dp"), pick="ends"),
        GroupRow("FIRST", "decoder", ("pp",), pick="first"),
        GroupRow("EXPERTS", "expert", ("ep",)),
        GroupRow("ALONE", "decoder", ("ep",), backend="gloo"),
        GroupRow("CHOSEN", "decoder", (), explicit=((3, 1, 62), (1, 8))),
        GroupRow("HALF", "half", ("b",)),
    ),
)
LARGE = GroupPlan(
    {"decoder": RankLayout(("tp", "cp", "dp", "pp"), (8, 2, 16, 16))},
    tuple(GroupRow("-".join(d), "decoder", d) for d in (("tp",), ("dp", "cp"), ("tp", "dp", "pp"))),
)


def installed_browser():
    for command in ("chromium", "chromium-browser", "google-chrome"):
        if shutil.which(command):
            return shutil.which(command)
    return None


CHROMIUM = installed_browser()
needs_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="no browser: install chromium (scripts/dev/setup_browser)"
)


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def opened(browser, tmp_path):
    """Open the page of a plan; what the browser complains about or asks for fails the test."""
    tabs = []
    complaints = []

    def open_page(plan=PLAN, hosts=8, title="A plan", offered=None, domains=None, **options):
        path = tmp_path / "page.html"
        places = Topology(plan.layout, hosts)
        path.write_text(page(plan, places, title, offered=offered, domains=domains), "utf-8")
        tab = browser.new_page(**options)
        tabs.append(tab)
        tab.on("pageerror", lambda error: complaints.append(str(error)))
        tab.on("console", lambda message: complaints.append(message.text))
        tab.on("request", lambda request: complaints.append(request.url))
        tab.goto(path.as_uri())
        return tab

    yield open_page
    for tab in tabs:
        tab.close()
    assert {*complaints} <= {(tmp_path / "page.html").as_uri()}


def lit(tab, kind="in"):
    ranks = tab.eval_on_selector_all(f".cell.{kind}", "cells => cells.map(c => +c.dataset.rank)")
    return sorted(ranks)


def focused(tab):
    return tab.evaluate("+document.activeElement.dataset.rank")


def links(tab, kind):
    return tab.eval_on_selector(f".ring .{kind}:not(.halo)", "p => p.getAttribute('d')").count("M")


# What the page and the picture stand on.


@pytest.mark.parametrize("hosts", [8, ["a"] * 24 + ["b"] * 40, ["x", "y"] * 32])
def test_every_rank_is_in_the_box_of_its_host(hosts):
    topology = Topology(DECODER, hosts)
    ranks_in_boxes = []
    for name, ranks in ranks_by_host(DECODER, topology).items():
        ranks_in_boxes += ranks
        for rank in ranks:
            assert topology.host(rank) == name
    assert sorted(ranks_in_boxes) == list(DECODER.ranks)


# The page.


@needs_browser
def test_the_page_computes_every_group_as_the_plan_does(opened):
    tab = opened()
    for number, row in enumerate(PLAN.rows):
        groups = tab.evaluate("number => hypergrid.groupsNamed(number)", number)
        assert groups == [list(ranks) for ranks in PLAN.all(row)]
    for rank in PLAN.window:
        groups = tab.evaluate("rank => hypergrid.groupsOf(rank)", rank)
        assert groups == [[row.label, list(ranks)] for row, ranks in PLAN.groups_of(rank)]
        for name in ("decoder", "expert"):
            ask = "([name, rank]) => hypergrid.coordinate(name, rank)"
            coordinate = tab.evaluate(ask, [name, rank])
            assert coordinate == PLAN.layouts[name].coordinate(rank)


def domains_of(ranks):
    """NVLink domains of that many ranks each, under 64 ranks."""
    return Topology(DECODER, ranks)


EQUAL = {
    "decoder": RankLayout(("tp", "dp", "ep", "pp"), (4, 8, 1, 2)),
    "expert": RankLayout(("tp", "dp", "ep", "pp"), (4, 1, 8, 2)),
}
PAGES = {
    "plan": {},
    "large": {"plan": LARGE, "hosts": [f"node-{rank // 8:03}" for rank in range(4096)]},
    "domains": {
        "plan": GroupPlan({"decoder": RankLayout(("tp", "cp"), (8, 8))}),
        "hosts": 4,
        "domains": domains_of(32),
    },
    "phone": {"hosts": 4, "domains": domains_of(32)},
    "experts": {"offered": ("decoder", "expert")},
    "equal": {"plan": GroupPlan(EQUAL)},
}


def act(tab, action, target):
    """Do what a line of pages.txt says."""
    if action == "press":
        tab.keyboard.press(target)
    elif action == "search":
        tab.fill("#sought", target)
        tab.keyboard.press("Enter")
    elif action == "check":
        tab.check(target, force=True)
    else:  # click, hover, focus
        getattr(tab.locator(target).first, action)()


EDGES = (" top", " bottom", " right", " height", " scrollHeight", " scrollWidth")


def edge(tab, place):
    """Where an element ends, or how large it is: ``aside bottom``."""
    selector, _, name = place.rpartition(" ")
    script = f"element => element.getBoundingClientRect().{name} ?? element.{name}"
    return tab.locator(selector).first.evaluate(script)


def check_shown(tab, subject, text):
    """Hold a line of pages.txt against the page."""
    if subject in ("in", "near", "pinned"):
        assert lit(tab, subject) == [int(rank) for rank in text.split()]
    elif subject == "links":
        assert f"{links(tab, 'inside')} inside, {links(tab, 'crossing')} crossing" == text
    elif subject == "focus":
        assert focused(tab) == int(text)
    elif subject.endswith(EDGES):
        operator, _, limit = text.partition(" ")
        bound = limit if limit.isdigit() else edge(tab, limit)
        assert eval(f"{edge(tab, subject)} {operator} {bound}"), edge(tab, subject)
    elif subject.endswith(" count"):
        assert tab.locator(subject.removesuffix(" count")).count() == int(text)
    else:
        assert text in tab.locator(subject).first.inner_text()


def follow(tab, lines):
    """Do and check what the lines of a visit say."""
    for line in lines:
        if line.startswith("-> "):
            action, _, target = line.removeprefix("-> ").partition(" ")
            act(tab, action, target)
        else:
            subject, text = re.fullmatch(r"(.+?):(?: (.*))?", line).groups("")
            check_shown(tab, subject, text)


_, *VISITS = (ROOT / "tests" / "show" / "pages.txt").read_text().rstrip().split("\n\n")


@needs_browser
@pytest.mark.parametrize("visit", VISITS, ids=lambda visit: visit.splitlines()[0])
def test_a_page_answers_what_its_reader_does(opened, visit):
    _, page_name, *lines = visit.splitlines()
    _, name, *window = page_name.split()
    viewport = dict(zip(("width", "height"), map(int, window or (1280, 800)), strict=True))
    follow(opened(**PAGES[name], viewport=viewport), lines)


@needs_browser
def test_names_are_text_whatever_they_contain(opened):
    evil = "</script><img src=x onerror=alert(1)><!--{{data}}\u2028\ud800&amp;"
    layout = RankLayout((evil, "__proto__"), (2, 2))
    plan = GroupPlan({evil: layout}, (GroupRow(evil, evil, (evil,)),))
    hosts = [evil, evil, "<b>", "<b>"]
    text = page(plan, Topology(layout, hosts), evil)
    assert text.count("</script>") == 2 and "<img" not in text and "<!--" not in text
    tab = opened(plan, hosts, evil)
    tab.hover("[data-rank='1']")
    assert lit(tab) == [0, 1]
    shown = evil.replace("\ud800", "\ufffd")
    assert tab.text_content("h1") == shown and tab.title().startswith("</script><img")
    assert shown[:40] in tab.inner_text("#list") and tab.locator("img, b:has(*)").count() == 0


# The picture.


def drawn(plan, hosts, path, **options):
    from hypergrid.show.picture import picture

    picture(plan, Topology(plan.layout, hosts), path, **options)
    return path.read_bytes()


def texts(plan, hosts, path, **options):
    svg = drawn(plan, hosts, path.with_suffix(".svg"), **options).decode()
    return re.findall(r">([^<>\n]+)</text>", svg)


def headings(lines):
    """The lines over panels: ``tp = 4``."""
    return [line for line in lines if " = " in line]


def test_a_picture_has_a_panel_for_each_dim_and_says_what_crosses(tmp_path):
    lines = texts(PLAN, 8, tmp_path / "plan")
    assert "64 ranks, 8 hosts: tp=4 cp=2 dp=4 pp=2, order tp-cp-dp-pp" in lines
    assert headings(lines) == ["tp = 4", "cp = 2", "dp = 4", "pp = 2"]
    assert lines.count("no group crosses hosts") == 2
    assert "16 of 16 groups cross hosts (up to 4)" in lines
    for rank in DECODER.ranks:
        assert lines.count(str(rank)) == 4
    assert headings(texts(PLAN, 8, tmp_path / "one", by="dp")) == ["dp = 4"]


def test_a_picture_has_no_background(tmp_path):
    from matplotlib.image import imread

    path = tmp_path / "plan.png"
    drawn(PLAN, 8, path)
    corners = imread(path)[[0, 0, -1, -1], [0, -1, 0, -1]]
    assert not corners[:, 3].any(), "a slab on a page of another colour"


def test_a_large_world_is_folded_but_shows_the_group_of_its_first_rank(tmp_path):
    lines = texts(LARGE, 8, tmp_path / "plan", by="pp")
    assert {"host0", "host32", "host480", "host511", "4095"} <= set(lines)
    ranks = 0
    for line in lines:
        if line.isdigit():
            ranks += 1
        elif line.startswith("+ "):  # such as "+ 1,024 ranks"
            ranks += int(line[2:-6].replace(",", ""))
    assert ranks == 4096


@pytest.mark.parametrize(
    ("name", "begins"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml"), ("a.PDF", b"%PDF")]
)
def test_the_suffix_gives_the_format_and_equal_plans_equal_pictures(tmp_path, name, begins):
    assert drawn(PLAN, 8, tmp_path / name).startswith(begins)
    assert drawn(PLAN, 8, tmp_path / "1.svg") == drawn(PLAN, 8, tmp_path / "2.svg")


def test_what_a_picture_cannot_show_is_refused(tmp_path):
    with pytest.raises(LayoutError, match=r"invalid dim 'xp'. Valid dims are \['tp', 'cp'"):
        drawn(PLAN, 8, tmp_path / "plan.png", by="xp")
    for name in ("plan.html", "plan"):
        with pytest.raises(LayoutError, match=r"name a \.png, \.svg or \.pdf file"):
            drawn(PLAN, 8, tmp_path / name)


def test_without_matplotlib_it_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install '\.\[plot\]' in a checkout"):
        drawn(PLAN, 8, tmp_path / "plan.png")
    assert page(PLAN, Topology(DECODER, 8)), "the page does without"


def test_a_picture_counts_what_crosses_nvlink_domains(tmp_path):
    lines = texts(PLAN, 8, tmp_path / "plan", domains=domains_of(16))
    assert "64 ranks, 8 hosts, 4 NVLink domains: tp=4 cp=2 dp=4 pp=2, order tp-cp-dp-pp" in lines
    assert "16 of 16 groups cross NVLink domains (up to 2)" in lines
    assert lines.count("no group crosses NVLink domains") == 2


def test_the_dims_of_several_layouts_are_named_with_their_layouts(tmp_path):
    layouts = {
        "decoder": RankLayout(("tp", "dp", "ep", "pp"), (4, 32, 1, 8)),
        "expert": RankLayout(("tp", "ep"), (2, 512)),  # other groups, the ranks in one order
    }
    lines = texts(GroupPlan(layouts), 8, tmp_path / "plan", layouts=["decoder", "expert"])
    assert {"decoder tp = 4", "expert tp = 2", "expert ep = 512"} <= {*lines}
