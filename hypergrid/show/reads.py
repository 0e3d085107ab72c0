"""The page of an audit: one HTML file without scripts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape

from hypergrid.show.audit import PHASES, Audit, Site
from hypergrid.show.page import digest, part

_STYLE = """
table { border-collapse: collapse; width: 100%; margin: 0.5rem 0 1rem }
th, td { text-align: left; padding: 0.15rem 0.6rem; border-bottom: 1px solid var(--line, #8884);
  vertical-align: top; overflow-wrap: anywhere }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
main.reads { display: block; padding: 0 1rem 2rem; max-width: 80rem }
li.wrong { margin-bottom: 0.5rem }
summary { cursor: pointer; padding: 0.2rem 0 }
"""


def page(found: Audit, title: str = "Who reads parallel_state") -> str:
    """The page's text, to be written as UTF-8: wrong states, then each file with its sites."""
    style = part("page.css") + _STYLE
    wrong = "".join(
        f'<li class="wrong"><b>{_text(each.kind)}</b>: {_text(each.text)} <i>{each.reads:,} reads '
        f"on {len(each.ranks)} ranks; {_text(each.example)}</i></li>"
        for each in found.problems
    )
    body = f"<h2>Wrong states</h2><ul>{wrong}</ul>" if wrong else "<p>No wrong state was read.</p>"
    sites: dict[tuple[str, str], list[Site]] = {}
    for site in found.sites:
        sites.setdefault((site.package, site.file), []).append(site)
    package = ""
    for row in found.files():
        if row.package != package:
            package = row.package
            body += f"<h2>{_text(package)}</h2>"
        body += (
            f"<details><summary>{_text(row.file)}: {row.reads:,} reads, {row.sites} sites</summary>"
            f"{_table(sites[row.package, row.file])}</details>"
        )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; style-src '
        f"{digest(style)}; base-uri 'none'; form-action 'none'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><title>{_text(title)}</title>'
        f'<style>{style}</style></head><body><header><div class="heading"><h1>{_text(title)}</h1>'
        f"<p>{found.reads:,} reads by {len(found.sites)} sites on {len(found.ranks)} ranks, "
        f"megatron-core {_text(' and '.join(found.releases))}</p></div></header>"
        f'<main class="reads">{body}</main></body></html>\n'
    )


def _table(sites: Iterable[Site]) -> str:
    rows = "".join(
        f'<tr><td class="n">{site.line}</td><td>{_text(site.function)}</td>'
        f'<td>{_text(site.name)}{" (writes)" * site.writes}</td><td class="n">{site.count:,}</td>'
        f"<td>{_counts({p: site.phases[p] for p in PHASES if p in site.phases})}</td>"
        f"<td>{_text(site.outermost)}</td><td>{_counts(site.states)}</td>"
        f"<td>{_counts(site.groups)}</td></tr>"
        for site in sorted(sites, key=lambda site: (-site.count, site.line))
    )
    heads = ("function", "reads")
    return (
        '<table><thead><tr><th class="n">line</th><th>'
        + "</th><th>".join(heads)
        + '</th><th class="n">times</th><th>phase</th><th>outermost module</th><th>state</th>'
        f"<th>group</th></tr></thead><tbody>{rows}</tbody></table>"
    )


def _counts(counts: Mapping[str, int]) -> str:
    names = {name or "none": count for name, count in counts.items()}
    if len(names) == 1:
        return _text(next(iter(names)))
    return _text(", ".join(f"{name} {count:,}" for name, count in names.items()))


def _text(text: str) -> str:
    return escape(text).encode("ascii", "xmlcharrefreplace").decode()
