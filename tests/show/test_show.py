"""The page and the picture of a plan: right, complete, usable, and alone."""

import re
import shutil
import sys

import pytest

from hypergrid import GroupPlan, GroupRow, LayoutError, RankLayout, Topology
from hypergrid.show.hosts import group_numbers, ranks_by_host
from hypergrid.show.page import page
from hypergrid.show.picture import CELL, COLOURS, CROSSING, _axes, _Panel
from hypergrid.show.terminal import table

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
    contexts = []
    complaints = []

    def open_page(plan=PLAN, hosts=8, title="A plan", offered=None, within=None, **options):
        path = tmp_path / f"{len(contexts)}.html"
        path.write_text(page(plan, hosts, title, offered=offered, within=within), "utf-8")

        def note_request(request):
            if request.url != path.as_uri():
                complaints.append(request.url)

        context = browser.new_context(**options)
        contexts.append(context)
        tab = context.new_page()
        tab.on("pageerror", lambda error: complaints.append(str(error)))
        tab.on("console", lambda message: complaints.append(message.text))
        tab.on("request", note_request)
        tab.goto(path.as_uri())
        return tab

    yield open_page
    for context in contexts:
        context.close()
    assert not complaints


def lit(tab, kind="in"):
    ranks = tab.eval_on_selector_all(f".cell.{kind}", "cells => cells.map(c => +c.dataset.rank)")
    return sorted(ranks)


def cell(tab, rank):
    return tab.locator(f"[data-rank='{rank}']")


def focused(tab):
    return tab.evaluate("+document.activeElement.dataset.rank")


def links(tab, kind):
    return tab.eval_on_selector(f".ring .{kind}:not(.halo)", "p => p.getAttribute('d')").count("M")


# What the page and the picture stand on.


@pytest.mark.parametrize("hosts", [8, [8] * 8, {"a": 24, "b": 40}, ["x", "y"] * 32])
def test_every_rank_is_in_the_box_of_its_host(hosts):
    topology = Topology(DECODER, hosts)
    ranks_in_boxes = []
    for name, ranks in ranks_by_host(DECODER, hosts).items():
        ranks_in_boxes += ranks
        for rank in ranks:
            assert topology.host(rank) == name
    assert sorted(ranks_in_boxes) == list(DECODER.ranks)


def test_hosts_that_are_too_few_are_refused():
    with pytest.raises(LayoutError, match="have 8 ranks"):
        page(PLAN, [8])


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


@needs_browser
def test_pointing_at_a_rank_lights_its_groups_and_lists_them(opened):
    tab = opened()
    cell(tab, 13).hover()
    assert lit(tab) == DECODER.group(13, "tp")
    neighbours = set()
    for dim in ("tp", "cp", "dp", "pp"):
        neighbours.update(DECODER.group(13, dim))
    assert lit(tab, "near") == sorted(neighbours)
    assert "Rank 13 on host1" in tab.inner_text("#list")
    labels = tab.eval_on_selector_all(
        "#list .label", "nodes => nodes.map(node => node.textContent)"
    )
    assert labels == ["tp", "cp", "dp", "pp", *(row.label for row, _ in PLAN.groups_of(13))]
    assert "4 hosts" in tab.inner_text("#list .group:has-text('DATA_WITH_CP')")
    tab.check("input[value=dp]", force=True)
    cell(tab, 12).hover()
    assert lit(tab) == DECODER.group(12, "dp")
    assert links(tab, "crossing") == 4 and links(tab, "inside") == 0
    tab.check("input[value=pp]", force=True)
    assert lit(tab) == [12, 44] and links(tab, "crossing") == 1, "two members have one link"


@needs_browser
def test_a_chosen_group_shows_its_members_and_the_links_that_cross(opened):
    tab = opened()
    cell(tab, 13).click()
    tab.click("#list .group:has-text('DATA_WITH_CP')")
    assert lit(tab) == [1, 5, 9, 13, 17, 21, 25, 29]
    chosen = tab.locator("#chosen")
    assert "8 ranks on 4 hosts" in chosen.inner_text()
    assert "4 of 8 links cross hosts" in chosen.inner_text()
    crossings = chosen.locator(".links li").all_inner_texts()
    assert [re.findall(r"\b\d+\b", text)[:2] for text in crossings] == [
        ["5", "9"],
        ["13", "17"],
        ["21", "25"],
        ["29", "1"],
    ]
    assert (links(tab, "inside"), links(tab, "crossing")) == (4, 4)
    assert "DATA_WITH_CP, group 1: 8 ranks on 4 hosts" in tab.inner_text("#status")
    cell(tab, 40).hover()
    assert lit(tab)[0] == 1, "a chosen group stays while the pointer wanders"


@needs_browser
def test_the_grid_is_one_tab_stop_and_the_keyboard_does_all(opened):
    tab = opened(viewport={"width": 1280, "height": 800})
    assert tab.locator(".cell[tabindex='0']").count() == 1
    tab.locator("input[name=dim]").first.focus()
    tab.keyboard.press("Tab")
    assert focused(tab) == 0
    for key, rank in [
        ("ArrowRight", 1),
        ("ArrowDown", 5),
        ("End", 7),
        ("ArrowRight", 8),
        ("ArrowLeft", 7),
        ("Home", 0),
        ("ArrowUp", 0),
        ("Control+End", 63),
        ("ArrowRight", 63),
    ]:
        tab.keyboard.press(key)
        assert focused(tab) == rank, key
    assert lit(tab) == DECODER.group(63, "tp")
    assert cell(tab, 63).evaluate("c => getComputedStyle(c).outlineStyle") == "solid"
    assert cell(tab, 63).get_attribute("aria-label") == "rank 63, host7, tp 3, cp 1, dp 3, pp 1"
    tab.keyboard.press("Enter")
    assert lit(tab, "pinned") == [63] and "pinned" in tab.inner_text("#list")
    cell(tab, 3).hover()
    assert "Rank 63" in tab.inner_text("#list")
    tab.keyboard.press("Escape")
    assert lit(tab, "pinned") == lit(tab, "near") == []
    assert tab.locator(".cell[tabindex='0']").count() == 1


@needs_browser
def test_search_finds_ranks_and_hosts_and_says_what_is_not_there(opened):
    tab = opened(LARGE, hosts={f"node-{number:03}": 8 for number in range(512)})

    def search(text):
        tab.fill("#sought", text)
        tab.keyboard.press("Enter")
        return tab.inner_text("#status")

    assert search("4001") == "Rank 4001 is on node-500."
    assert focused(tab) == 4001
    top = cell(tab, 4001).evaluate("c => c.getBoundingClientRect().top")
    assert 0 < top < tab.viewport_size["height"]
    assert search("NODE-007") == "node-007 has 8 ranks."
    assert focused(tab) == 56
    assert search("4096") == "There is no rank 4096: ranks go from 0 to 4095."
    assert search("elsewhere") == "No host is called “elsewhere”."
    assert search(" ").startswith("Type the number of a rank")


def luminance(colour):
    """Relative luminance of "rgb(0, 114, 178)", as WCAG defines it."""
    channels = []
    for part in re.findall(r"\d+", colour)[:3]:
        channel = int(part) / 255
        linear = channel / 12.92 if channel <= 0.04045 else ((channel + 0.055) / 1.055) ** 2.4
        channels.append(linear)
    red, green, blue = channels
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(colour, background):
    low, high = sorted((luminance(colour), luminance(background)))
    return (high + 0.05) / (low + 0.05)


@needs_browser
def test_names_are_text_whatever_they_contain(opened):
    evil = "</script><img src=x onerror=alert(1)><!--{{data}}\u2028\ud800&amp;"
    layout = RankLayout((evil, "__proto__"), (2, 2))
    plan = GroupPlan({evil: layout}, (GroupRow(evil, evil, (evil,)),))
    text = page(plan, {evil: 2, "<b>": 2}, evil)
    assert text.count("</script>") == 2 and "<img" not in text and "<!--" not in text
    tab = opened(plan, {evil: 2, "<b>": 2}, evil)
    cell(tab, 1).hover()
    assert lit(tab) == [0, 1]
    shown = evil.replace("\ud800", "\ufffd")
    assert tab.text_content("h1") == shown and tab.title().startswith("</script><img")
    assert shown[:40] in tab.inner_text("#list") and tab.locator("img, b:has(*)").count() == 0


@needs_browser
@pytest.mark.parametrize(("width", "height", "most"), [(1280, 800, 4), (390, 844, 8)])
def test_a_large_job_opens_as_hosts_and_zooms_into_one(opened, width, height, most):
    tab = opened(LARGE, viewport={"width": width, "height": height})
    assert tab.evaluate("document.documentElement.scrollHeight") < most * height
    tall = "c => c.getBoundingClientRect().height"
    assert cell(tab, 1000).evaluate(tall) < 10, "many hosts at once"
    cell(tab, 1000).click()
    assert cell(tab, 1000).evaluate(tall) > 20 and cell(tab, 1007).evaluate(tall) > 20
    assert lit(tab, "pinned") == [1000] and cell(tab, 999).evaluate(tall) < 10
    assert cell(tab, 1000).evaluate("c => getComputedStyle(c).fontSize") == "12.5px"
    tab.check("input[value=ranks]", force=True)
    assert cell(tab, 999).evaluate(tall) > 20, "every rank has its number"
    tab.check("input[value=hosts]", force=True)
    tab.keyboard.press("Escape")
    assert cell(tab, 1000).evaluate(tall) < 10


@needs_browser
def test_inside_an_nvlink_domain_no_link_of_the_page_crosses(opened):
    plan = GroupPlan({"decoder": RankLayout(("tp", "cp"), (8, 8))})
    within = {f"host{i}": f"NVLink domain {i // 8}" for i in range(16)}
    tab = opened(plan, 4, within=within)
    assert tab.inner_text("#summary").startswith("64 ranks on 16 hosts.")
    assert "inside an NVLink domain: tp · across NVLink domains: cp" in tab.inner_text("#summary")
    assert "link across NVLink domains" in tab.inner_text("#legend")
    cell(tab, 13).hover()
    assert lit(tab) == list(range(8, 16))
    assert (links(tab, "inside"), links(tab, "crossing")) == (8, 0)
    tab.locator("#list .group:has-text('cp')").first.click()
    assert "8 ranks on 2 NVLink domains" in tab.inner_text("#chosen")
    assert "2 of 8 links cross NVLink domains" in tab.inner_text("#chosen")


@needs_browser
def test_on_a_phone_the_overview_hides_no_rank_and_nothing_sticks_out(opened):
    within = {f"host{i}": f"NVLink domain {i // 8}" for i in range(16)}
    tab = opened(PLAN, 4, within=within, viewport={"width": 390, "height": 844})
    assert tab.evaluate("document.documentElement.scrollWidth") <= 390
    edge = "e => e.getBoundingClientRect()"
    assert tab.eval_on_selector("#search", f"{edge}.right") <= 390
    overview = tab.eval_on_selector("aside", f"{edge}.bottom")
    assert overview <= tab.eval_on_selector("#grid", f"{edge}.top")
    cell(tab, 60).click()
    sheet = tab.eval_on_selector("aside", f"{edge}.top")
    assert cell(tab, 60).evaluate(f"{edge}.bottom") <= sheet


# The picture.


def drawn(plan, hosts, path, **options):
    from hypergrid.show.picture import picture

    picture(plan, hosts, path, **options)
    return path.read_bytes()


def texts(plan, hosts, path, **options):
    svg = drawn(plan, hosts, path.with_suffix(".svg"), **options).decode()
    return re.findall(r">([^<>\n]+)</text>", svg)


def headings(lines):
    """The lines over panels: ``tp = 4``."""
    return [line for line in lines if " = " in line]


def test_a_picture_has_a_panel_for_each_dim_and_says_what_crosses(tmp_path):
    lines = texts(PLAN, 8, tmp_path / "plan")
    assert "64 ranks on 8 hosts: tp=4 cp=2 dp=4 pp=2, order tp-cp-dp-pp" in lines
    assert headings(lines) == ["tp = 4", "cp = 2", "dp = 4", "pp = 2"]
    assert lines.count("inside a host") == 2
    assert "every group crosses hosts (4 hosts)" in lines
    for rank in DECODER.ranks:
        assert lines.count(str(rank)) == 4
    assert headings(texts(PLAN, 8, tmp_path / "one", by="dp")) == ["dp = 4"]


def panel_of(layout, hosts, dim, within=None):
    """A panel as matplotlib draws it alone: the panel, and axes of which an inch is a unit."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panel = _Panel(layout, hosts, dim, within or {}, dim)
    figure = Figure(figsize=(panel.width, panel.height))
    FigureCanvasAgg(figure)
    axes = _axes(figure, panel.tiles_x, 0)
    panel.draw(axes)
    return panel, axes


@pytest.mark.parametrize("dim", ["tp", "cp", "dp", "pp"])
def test_groups_are_told_apart_by_colour_and_none_is_grey(dim):
    from colorsys import rgb_to_hsv

    panel, axes = panel_of(DECODER, 8, dim)
    framed = [tile for tile in axes.patches if tile.get_width() < CELL]
    assert len(framed) == len(DECODER.group(0, dim)), "the first group's frames"
    (reach,) = (text for text in axes.texts if text.get_text() == panel.reach)
    assert (reach.get_color() == CROSSING) == (dim in ("dp", "pp"))
    colours = [tile.get_facecolor() for tile in axes.patches if tile.get_width() == CELL]
    numbers = group_numbers(DECODER, dim)
    colour_of_group = {}
    for rank, colour in enumerate(colours):
        assert colour_of_group.setdefault(numbers[rank], colour) == colour
        _, saturation, _ = rgb_to_hsv(*colour[:3])
        assert saturation > 0.1, "a grey tile"
    assert len(colours) == 64
    first_groups = list(colour_of_group.values())[: len(COLOURS)]
    assert len(set(first_groups)) == len(first_groups) == min(len(COLOURS), panel.groups) >= 14


def test_a_picture_has_no_background_and_is_legible_on_light_and_dark_pages(tmp_path):
    from matplotlib.colors import to_rgb
    from matplotlib.image import imread

    path = tmp_path / "plan.png"
    drawn(PLAN, 8, path)
    corners = imread(path)[[0, 0, -1, -1], [0, -1, 0, -1]]
    assert not corners[:, 3].any(), "a slab on a page of another colour"
    _, axes = panel_of(DECODER, 8, "pp")
    labels = [text for text in axes.texts if not text.get_text().isdigit()]
    assert len(labels) > 8
    for part in labels:
        colour = str([round(255 * channel) for channel in to_rgb(part.get_color())])
        for page_colour in ("255, 255, 255", "30, 32, 41", "13, 17, 23"):
            assert contrast(colour, page_colour) > 3.8


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


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"by": "xp"}, r"invalid dim 'xp'. Valid dims are \['tp', 'cp', 'dp', 'ep', 'pp'\]"),
        (
            {"layouts": ["x"]},
            r"invalid layout 'x'. Valid layouts are \['decoder', 'expert', 'half'\]",
        ),
    ],
)
def test_what_a_picture_cannot_show_is_refused(tmp_path, options, says):
    with pytest.raises(LayoutError, match=says):
        drawn(PLAN, 8, tmp_path / "plan.png", **options)
    with pytest.raises(LayoutError, match=r"name a \.png, \.svg or \.pdf file"):
        drawn(PLAN, 8, tmp_path / "plan.gif")


def test_without_matplotlib_it_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install '\.\[plot\]' in a checkout"):
        drawn(PLAN, 8, tmp_path / "plan.png")
    assert page(PLAN, 8), "the page does without"


WITHIN = {f"host{i}": f"NVLink domain {i // 2}" for i in range(8)}


def test_a_picture_and_a_table_have_a_heading_for_each_nvlink_domain(tmp_path):
    domains = ["NVLink domain 0", "NVLink domain 1", "NVLink domain 2", "NVLink domain 3"]
    svg = drawn(PLAN, 8, tmp_path / "plan.svg", by="tp", within=WITHIN).decode()
    assert re.findall(r">(NVLink domain \d)<", svg) == domains
    lines = [line.plain for line in table(DECODER, 8, "tp", within=WITHIN)]
    assert [line for line in lines if line.startswith("NVLink")] == domains
    assert lines[0] == "NVLink domain 0" and lines[1].startswith("host0")


@needs_browser
def test_the_page_opens_with_an_overview_and_a_group_that_crosses(opened):
    tab = opened(offered=("decoder", "expert"))
    assert lit(tab) == DECODER.group(0, "dp") and links(tab, "crossing") == 4
    assert tab.locator(".lit").count() == 0, "nothing else fades"
    overview = tab.locator("#list .group").all_inner_texts()
    assert [text.split("\n")[0] for text in overview] == [
        *("tp = 4", "cp = 2", "dp = 4", "pp = 2"),
        *("expert ep = 4", "expert dp = 2"),
    ]
    assert "16 groups, inside a host" in overview[0]
    assert "16 groups, every group crosses hosts" in overview[2] and "4 hosts" in overview[2]
    assert tab.locator("#list [aria-pressed=true]").inner_text().startswith("dp = 4")
    tab.locator("#list .group").nth(4).click()
    assert lit(tab) == EXPERT.group(0, "ep")
    tab.keyboard.press("Escape")
    assert lit(tab) == [] and "tp = 4" in tab.inner_text("#list")


@needs_browser
def test_dims_with_equal_groups_are_one_entry_of_the_overview(opened):
    layouts = {
        "decoder": RankLayout(("tp", "dp", "ep", "pp"), (4, 8, 1, 2)),
        "expert": RankLayout(("tp", "dp", "ep", "pp"), (4, 1, 8, 2)),
    }
    tab = opened(GroupPlan(layouts))
    entries = tab.locator("#list .group .label").all_inner_texts()
    assert entries == ["tp = 4", "dp and expert ep = 8", "pp = 2"]


def test_an_expert_layout_has_panels_of_its_own_for_the_groups_that_differ(tmp_path):
    shown_texts = texts(PLAN, 8, tmp_path / "plan", layouts=("decoder", "expert"))
    panels = [text for text in shown_texts if " = " in text]
    assert panels == ["tp = 4", "cp = 2", "dp = 4", "pp = 2", "expert ep = 4", "expert dp = 2"]
    assert any(text.startswith("expert: tp=4 ep=4 dp=2 pp=2") for text in shown_texts)


def test_a_dim_with_the_groups_of_another_is_named_beside_it(tmp_path):
    layouts = {
        "decoder": RankLayout(("tp", "dp", "ep", "pp"), (4, 32, 1, 8)),
        "expert": RankLayout(("tp", "dp", "ep", "pp"), (4, 1, 32, 8)),
        "levels": RankLayout(("tp", "dp0", "dp1", "ep", "pp"), (4, 4, 8, 1, 8)),
    }
    shown_texts = texts(GroupPlan(layouts), 8, tmp_path / "plan", layouts=list(layouts))
    panels = [text for text in shown_texts if " = " in text]
    assert panels == ["tp = 4", "dp and expert ep = 32", "pp = 8", "dp0 = 4", "dp1 = 8"]
    layouts["expert"] = RankLayout(("tp", "ep"), (2, 512))  # other groups, the ranks in one order
    shown_texts = texts(GroupPlan(layouts), 8, tmp_path / "plan", layouts=["decoder", "expert"])
    assert {"expert tp = 2", "expert ep = 512"} <= {*shown_texts}
