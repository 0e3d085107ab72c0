"""The page and the picture of a plan: right, complete, usable, and alone."""

import re
import shutil
import sys
from itertools import pairwise
from time import perf_counter

import pytest

from hypergrid import GroupPlan, GroupRow, LayoutError, RankLayout, Topology
from hypergrid.show.hosts import group_numbers, ranks_by_host
from hypergrid.show.page import page
from hypergrid.show.picture import CELL, COLOURS, _axes, _Panel

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
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
needs_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="no browser: install chromium (scripts/dev/setup_browser)"
)


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture
def opened(browser, tmp_path):
    """Open the page of a plan; what the browser complains about or asks for fails the test."""
    contexts, wrong = [], []

    def open_(plan=PLAN, hosts=8, title="A plan", offered=None, within=None, **options):
        path = tmp_path / f"{len(contexts)}.html"
        path.write_text(page(plan, hosts, title, offered=offered, within=within), "utf-8")
        context = browser.new_context(**options)
        contexts.append(context)
        tab = context.new_page()
        tab.on("pageerror", lambda error: wrong.append(str(error)))
        tab.on("console", lambda said: wrong.append(said.text))
        tab.on("request", lambda asked: asked.url == path.as_uri() or wrong.append(asked.url))
        tab.goto(path.as_uri())
        return tab

    yield open_
    for context in contexts:
        context.close()
    assert not wrong


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
    boxes = ranks_by_host(DECODER, hosts)
    topology = Topology(DECODER, hosts)
    assert sorted(rank for ranks in boxes.values() for rank in ranks) == list(DECODER.ranks)
    assert all(topology.host(rank) == name for name, ranks in boxes.items() for rank in ranks)


def test_hosts_that_are_too_few_are_refused():
    with pytest.raises(LayoutError, match="have 8 ranks"):
        page(PLAN, [8])


# The page.


@needs_browser
def test_the_page_computes_every_group_as_the_plan_does(opened):
    tab = opened()
    for i, row in enumerate(PLAN.rows):
        groups = tab.evaluate("i => hypergrid.groupsNamed(i)", i)
        assert groups == [list(ranks) for ranks in PLAN.all(row)]
    for rank in PLAN.window:
        groups = tab.evaluate("rank => hypergrid.groupsOf(rank)", rank)
        assert groups == [[row.label, list(ranks)] for row, ranks in PLAN.groups_of(rank)]
        for name in ("decoder", "expert"):
            at = tab.evaluate("([name, rank]) => hypergrid.coordinate(name, rank)", [name, rank])
            assert at == PLAN.layouts[name].coordinate(rank)


@needs_browser
def test_a_span_with_an_offset_and_hosts_that_interleave(opened):
    layout = RankLayout(("tp", "dp"), (2, 4), 8)
    plan = GroupPlan({"vision": layout}, (GroupRow("DP", "vision", ("dp",)),))
    tab = opened(plan, hosts=["x", "y"] * 8)
    assert tab.inner_text("#summary").startswith("8 ranks from 8 on 2 hosts. tp=2 dp=4")
    boxes = tab.eval_on_selector_all(
        ".host",
        "boxes => boxes.map(b => [...b.querySelectorAll('.cell')].map(c => +c.dataset.rank))",
    )
    assert boxes == list(ranks_by_host(layout, ["x", "y"] * 8).values())
    assert tab.evaluate("hypergrid.groupsOf(9)") == [["DP", [9, 11, 13, 15]]]


@needs_browser
def test_pointing_at_a_rank_lights_its_groups_and_lists_them(opened):
    tab = opened()
    cell(tab, 13).hover()
    assert lit(tab) == DECODER.group(13, "tp")
    around = {r for dim in ("tp", "cp", "dp", "pp") for r in DECODER.group(13, dim)}
    assert lit(tab, "near") == sorted(around)
    assert "Rank 13 on host1" in tab.inner_text("#list")
    labels = tab.eval_on_selector_all("#list .label", "all => all.map(each => each.textContent)")
    assert labels == ["tp", "cp", "dp", "pp", *(row.label for row, _ in PLAN.groups_of(13))]
    assert "4 hosts" in tab.inner_text("#list .group:has-text('DATA_WITH_CP')")
    tab.check("input[value=dp]", force=True)
    cell(tab, 12).hover()
    assert lit(tab) == DECODER.group(12, "dp")
    assert links(tab, "crossing") == 4 and links(tab, "inside") == 0
    tab.check("input[value=pp]", force=True)
    assert lit(tab) == [12, 44] and links(tab, "crossing") == 1, "two members have one link"


@needs_browser
def test_colours_tell_the_groups_of_the_chosen_dim(opened):
    tab = opened()
    tab.check("input[value=cp]", force=True)
    numbers = tab.eval_on_selector_all(
        ".cell", "all => all.map(c => [+c.dataset.rank, c.dataset.number])"
    )
    by_number = {}
    for rank, number in numbers:
        by_number.setdefault(int(number), []).append(rank)
    assert [sorted(by_number[n]) for n in sorted(by_number)] == DECODER.groups("cp").tolist()


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
def test_a_name_leads_to_each_of_its_groups(opened):
    tab = opened()
    tab.click("#tab-names")
    name = tab.locator("#list > ul > li", has_text="EXPERTS")
    assert "ep · 16 groups" in name.inner_text()
    name.locator("button").first.click()
    name.locator(".inner .group").nth(5).click()
    assert lit(tab) == list(PLAN.all(PLAN.rows[5])[5])
    assert tab.get_attribute(".inner [aria-pressed=true]", "class") == "group"
    tab.keyboard.press("Escape")
    assert lit(tab) == [] and not tab.is_visible("#chosen")


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
    tab = opened(LARGE, hosts={f"node-{i:03}": 8 for i in range(512)})

    def search(text):
        tab.fill("#sought", text)
        tab.keyboard.press("Enter")
        return tab.inner_text("#status")

    assert search("4001") == "Rank 4001 is on node-500."
    assert focused(tab) == 4001
    top = cell(tab, 4001).evaluate("c => c.getBoundingClientRect().top")
    assert 0 < top < tab.viewport_size["height"]
    assert search("NODE-007") == "node-007 has 8 ranks." and focused(tab) == 56
    assert search("4096") == "There is no rank 4096: ranks go from 0 to 4095."
    assert search("elsewhere") == "No host is called “elsewhere”."
    assert search(" ").startswith("Type the number of a rank")


@needs_browser
def test_layouts_of_the_whole_span_can_be_switched(opened):
    tab = opened(offered=("decoder", "expert"))
    values = tab.eval_on_selector_all("input[name=layout]", "all => all.map(each => each.value)")
    assert values == ["decoder", "expert"]
    assert "tp=4 cp=2 dp=4 pp=2, order tp-cp-dp-pp" in tab.inner_text("#summary")
    assert "inside a host: tp, cp · across hosts: dp, pp" in tab.inner_text("#summary")
    tab.check("input[value=expert]", force=True)
    assert "tp=4 ep=4 dp=2 pp=2, order tp-ep-dp-pp" in tab.inner_text("#summary")
    tab.check("input[value=ep]", force=True)
    cell(tab, 13).hover()
    assert lit(tab) == EXPERT.group(13, "ep")
    assert cell(tab, 13).get_attribute("aria-label") == "rank 13, host1, tp 1, ep 3, dp 0, pp 0"


def luminance(colour):
    channels = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_theme_follows_the_system_until_one_switches_it(opened, scheme):
    tab = opened(color_scheme=scheme)
    background = "getComputedStyle(document.documentElement).backgroundColor"
    before = tab.evaluate(background)
    assert (luminance(before) > 0.5) == (scheme == "light")
    for _ in range(2):
        ink = tab.evaluate("getComputedStyle(document.documentElement).color")
        muted = tab.evaluate("getComputedStyle(document.querySelector('#summary')).color")
        here = tab.evaluate(background)
        assert contrast(ink, here) > 7 and contrast(muted, here) > 4.5
        for number in range(8):
            drawn = f"getComputedStyle(document.querySelector('.cell[data-colour=\"{number}\"]'))"
            assert (
                contrast(tab.evaluate(f"{drawn}.color"), tab.evaluate(f"{drawn}.backgroundColor"))
                > 4.5
            )
        tab.click("#theme")
        assert (luminance(tab.evaluate(background)) > 0.5) != (luminance(here) > 0.5)
    tab.click("#theme")
    for _ in range(50):  # the browser stores it in another process
        tab.wait_for_timeout(200)
        tab.reload()
        if tab.evaluate(background) != before:
            return
    pytest.fail("the switch is not remembered")


@needs_browser
def test_a_page_that_is_refused_storage_works(opened):
    tab = opened()
    tab.add_init_script("Object.defineProperty(window, 'localStorage', {get() { throw Error() }})")
    tab.reload()
    tab.click("#theme")
    assert tab.evaluate("document.documentElement.dataset.theme") == "dark"


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
def test_plans_without_wide_dims_or_names_are_drawn_too(opened):
    tab = opened(GroupPlan({"one": RankLayout(("tp",), (1,))}), 8)
    cell(tab, 0).click()
    assert tab.inner_text("#summary").startswith("1 rank on 1 host.")
    tab.click("#tab-names")
    assert tab.inner_text("#list") == "The plan names no group."


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
    assert tab.eval_on_selector("#theme", f"{edge}.right") <= 390
    overview = tab.eval_on_selector("aside", f"{edge}.bottom")
    assert overview <= tab.eval_on_selector("#grid", f"{edge}.top")
    cell(tab, 60).click()
    sheet = tab.eval_on_selector("aside", f"{edge}.top")
    assert cell(tab, 60).evaluate(f"{edge}.bottom") <= sheet


@needs_browser
def test_it_fits_a_narrow_window(opened):
    tab = opened(viewport={"width": 400, "height": 800})
    cell(tab, 13).click()
    tab.click("#list .group:has-text('DATA_WITH_CP')")
    assert tab.evaluate("document.documentElement.scrollWidth") <= 400


@needs_browser
def test_four_thousand_ranks_answer_at_once(opened, capsys):
    began = perf_counter()
    tab = opened(LARGE, viewport={"width": 1280, "height": 800})
    tab.evaluate("new Promise(done => requestAnimationFrame(() => setTimeout(done)))")
    load = perf_counter() - began
    answer = """async rank => {
        const cell = document.querySelector(`[data-rank='${rank}']`);
        const began = performance.now();
        const at = {bubbles: true, screenX: rank, screenY: rank};
        cell.dispatchEvent(new PointerEvent('pointermove', at));
        await new Promise(done => requestAnimationFrame(() => setTimeout(done)));
        return performance.now() - began;
    }"""
    times = sorted(tab.evaluate(answer, rank) for rank in range(0, 160, 4))
    assert lit(tab) == LARGE.layouts["decoder"].group(156, "tp")
    with capsys.disabled():
        print(f"\n4,096 ranks: drawn after {load:.2f} s, hover {times[20]:.0f} ms", end="")
    assert load < 20 and times[20] < 1000, "a hang, not a slow machine"


# The picture.


def drawn(plan, hosts, path, **options):
    from hypergrid.show.picture import picture

    picture(plan, hosts, path, **options)
    return path.read_bytes()


def texts(plan, hosts, path, **options):
    written = drawn(plan, hosts, path.with_suffix(".svg"), **options).decode()
    return re.findall(r">([^<>\n]+)</text>", written)


def test_a_picture_has_a_panel_for_each_dim_and_says_what_crosses(tmp_path):
    said = texts(PLAN, 8, tmp_path / "plan")
    assert "64 ranks on 8 hosts: tp=4 cp=2 dp=4 pp=2, order tp-cp-dp-pp" in said
    assert [text for text in said if " = " in text] == ["tp = 4", "cp = 2", "dp = 4", "pp = 2"]
    assert said.count("inside a host") == 2 and "every group crosses hosts (4 hosts)" in said
    assert all(said.count(str(rank)) == 4 for rank in DECODER.ranks)
    (only,) = (text for text in texts(PLAN, 8, tmp_path / "one", by="dp") if " = " in text)
    assert only == "dp = 4"


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
    tiles = [tile.get_facecolor() for tile in axes.patches if tile.get_width() == CELL]
    assert len(tiles) == 64
    assert all(rgb_to_hsv(*tile[:3])[1] > 0.1 for tile in tiles), "a grey tile"
    numbers = group_numbers(DECODER, dim)
    colour_of = {}
    for rank, tile in enumerate(tiles):
        assert colour_of.setdefault(numbers[rank], tile) == tile
    assert len(set(colour_of.values())) == min(len(COLOURS), panel.groups) >= 14
    first_groups = list(colour_of.values())[: len(COLOURS)]
    assert len(set(first_groups)) == len(first_groups)


@pytest.mark.parametrize(
    ("layout", "hosts", "domains"),
    [
        (LARGE.layouts["decoder"], 8, 0),
        (LARGE.layouts["decoder"], 4, 16),
        (RankLayout(("tp", "dp"), (6, 128)), 8, 2),  # members in all columns
        (RankLayout(("tp", "dp"), (4, 100)), ["x", "y"] * 200, 1),
    ],
)
def test_no_link_strikes_through_a_text(layout, hosts, domains):
    names = ranks_by_host(layout, hosts)
    within = {name: f"NVLink domain {i // domains}" for i, name in enumerate(names) if domains}
    for dim in layout.dims:
        _, axes = panel_of(layout, hosts, dim, within)
        boxes = [text.get_window_extent() for text in axes.texts]
        links = [line.get_transform().transform(line.get_xydata()) for line in axes.lines]
        assert links
        for link in links:
            for (ax, ay), (bx, by) in pairwise(link.tolist()):
                (left, right), (low, high) = sorted((ax, bx)), sorted((ay, by))
                for box in boxes:
                    beside = right < box.x0 or left > box.x1
                    assert beside or high < box.y0 or low > box.y1


@pytest.mark.parametrize("dim", ["tp", "cp", "dp", "pp"])
@pytest.mark.parametrize("per_host", [8, 12])
def test_what_joins_a_group_ends_at_its_ranks_and_passes_between_all_others(dim, per_host):
    panel = _Panel(DECODER, per_host, dim, {}, dim)
    assert len(panel.links) == len(panel.members) - 1  # no ring: pp has none
    for way, _ in panel.links:
        for (ax, ay), (bx, by) in pairwise(way):
            assert ax == bx or ay == by
            for x, y in panel.places.values():
                across = min(ax, bx) < x + CELL - 1e-9 and max(ax, bx) > x + 1e-9
                down = min(ay, by) < y + CELL - 1e-9 and max(ay, by) > y + 1e-9
                assert not (across and down)


def test_an_expert_layout_has_panels_of_its_own_for_the_groups_that_differ(tmp_path):
    said = texts(PLAN, 8, tmp_path / "plan", layouts=("decoder", "expert"))
    panels = [text for text in said if " = " in text]
    assert panels == ["tp = 4", "cp = 2", "dp = 4", "pp = 2", "expert ep = 4", "expert dp = 2"]
    assert any(text.startswith("expert: tp=4 ep=4 dp=2 pp=2") for text in said)


def test_a_dim_with_the_groups_of_another_is_named_beside_it(tmp_path):
    layouts = {
        "decoder": RankLayout(("tp", "dp", "ep", "pp"), (4, 32, 1, 8)),
        "expert": RankLayout(("tp", "dp", "ep", "pp"), (4, 1, 32, 8)),
        "levels": RankLayout(("tp", "dp0", "dp1", "ep", "pp"), (4, 4, 8, 1, 8)),
    }
    said = texts(GroupPlan(layouts), 8, tmp_path / "plan", layouts=list(layouts))
    panels = [text for text in said if " = " in text]
    assert panels == ["tp = 4", "dp and expert ep = 32", "pp = 8", "dp0 = 4", "dp1 = 8"]
    layouts["expert"] = RankLayout(("tp", "ep"), (2, 512))  # other groups, the ranks in one order
    said = texts(GroupPlan(layouts), 8, tmp_path / "plan", layouts=["decoder", "expert"])
    assert {"expert tp = 2", "expert ep = 512"} <= {*said}


def test_a_picture_has_no_background_and_is_legible_on_light_and_dark_pages(tmp_path):
    from matplotlib.colors import to_rgb
    from matplotlib.image import imread

    path = tmp_path / "plan.png"
    drawn(PLAN, 8, path)
    corners = imread(path)[[0, 0, -1, -1], [0, -1, 0, -1]]
    assert corners.shape == (4, 4) and not corners[:, 3].any(), "a slab on a page of another colour"
    _, axes = panel_of(DECODER, 8, "pp")
    beside_tiles = [text for text in axes.texts if not text.get_text().isdigit()]
    assert len(beside_tiles) > 8
    for drawn_part in (*beside_tiles, *axes.lines):
        colour = str([round(255 * part) for part in to_rgb(drawn_part.get_color())])
        for page_colour in ("255, 255, 255", "30, 32, 41", "13, 17, 23"):
            assert contrast(colour, page_colour) > 3.8


def test_inside_an_nvlink_domain_nothing_crosses(tmp_path):
    layout = RankLayout(("tp", "cp", "dp"), (8, 4, 4))
    said = texts(
        GroupPlan({"decoder": layout}),
        4,
        tmp_path / "plan",
        within={f"host{i}": f"NVLink domain {i // 8}" for i in range(32)},
    )
    assert said.count("inside an NVLink domain") == 2
    assert "every group crosses NVLink domains (4 domains)" in said
    assert {"link inside an NVLink domain", "link across NVLink domains"} <= {*said}
    panel, _ = panel_of(layout, 4, "tp", {f"host{i}": "one" for i in range(32)})
    assert [kind for _, kind in panel.links] == ["inside"] * 7


def test_a_picture_takes_hosts_by_name_and_other_layouts(tmp_path):
    said = texts(PLAN, {"$a_1$": 3, "b": 61}, tmp_path / "plan", layouts=["expert"], by="tp")
    assert "$a_1$" in said and "1 of 16 groups cross (2 hosts)" in said


def test_a_large_world_is_folded_but_shows_the_group_of_its_first_rank(tmp_path):
    said = texts(LARGE, 8, tmp_path / "plan", by="pp")
    assert {"host0", "host32", "host480", "host511", "4095", "members not shown"} <= {*said}
    hidden = sum(int(text[2:-6].replace(",", "")) for text in said if text.startswith("+ "))
    assert hidden + sum(text.isdigit() for text in said) == 4096


@pytest.mark.parametrize(
    ("name", "begins"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml"), ("a.PDF", b"%PDF")]
)
def test_the_suffix_gives_the_format_and_equal_plans_equal_pictures(tmp_path, name, begins):
    assert drawn(PLAN, 8, tmp_path / name).startswith(begins)
    one, two = (drawn(PLAN, 8, tmp_path / f"{i}.svg") for i in "12")
    assert one == two


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


@needs_browser
def test_the_page_has_a_heading_for_each_nvlink_domain(browser, tmp_path):
    (tmp_path / "page.html").write_text(page(PLAN, 8, within=WITHIN), "utf-8")
    opened = browser.new_page()
    opened.goto(f"file://{tmp_path}/page.html")
    assert opened.locator(".domain").all_inner_texts() == list(dict.fromkeys(WITHIN.values()))
    order = opened.locator("#grid > div").evaluate_all("all => all.map(one => one.className)")
    assert order == ["domain", "host", "host"] * 4
    opened.close()


def test_a_picture_and_a_table_have_a_heading_for_each_nvlink_domain(tmp_path):
    from hypergrid.show.picture import picture
    from hypergrid.show.terminal import table

    picture(PLAN, 8, tmp_path / "plan.svg", by="tp", within=WITHIN)
    drawn = re.findall(r">(NVLink domain \d)<", (tmp_path / "plan.svg").read_text())
    lines = [line.plain for line in table(DECODER, 8, "tp", within=WITHIN)]
    assert drawn == list(dict.fromkeys(WITHIN.values()))
    assert [line for line in lines if line.startswith("NVLink")] == drawn
    assert lines[0] == "NVLink domain 0" and lines[1].startswith("host0")
