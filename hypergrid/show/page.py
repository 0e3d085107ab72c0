"""A plan as one HTML page that needs nothing else: no network, no server, no second file."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from hypergrid.layout import LayoutError
from hypergrid.plan import GroupPlan
from hypergrid.show.hosts import ranks_by_host
from hypergrid.topology import Topology

MOST_RANKS = 1 << 16  # a browser opens these in some seconds, and 1,048,576 not in two minutes
# One script in these parts: arithmetic, elements, the grid, the panel, events.
SCRIPTS = ("plan.js", "elements.js", "job.js", "board.js", "panel.js", "page.js")


def page(
    plan: GroupPlan,
    hosts: Topology,
    title: str = "Who talks to whom",
    *,
    offered: Sequence[str] | None = None,
    job: Mapping[str, Any] | None = None,
    domains: Topology | None = None,
    by: str | None = None,
) -> str:
    """The page's text, to be written as UTF-8; it computes every group itself from the plan.

    ``title`` is the heading. ``offered`` names the layouts that can be switched to, if they are
    over the ranks of the first one; by default all. ``job`` is what
    ``hypergrid.show.job.page_data`` says of a job with this plan. ``domains`` are the NVLink
    domains of the ranks, ``by`` is the dim that colours show at first.

    Raises LayoutError where ``hosts`` have too few ranks, or the plan more than 65,536.
    """
    if plan.layout.size > MOST_RANKS:
        raise LayoutError(
            f"a page of {plan.layout.size:,} ranks opens in no browser: at most {MOST_RANKS:,} are "
            f"shown. `hypergrid show --hosts 0-3` prints the ranks of these hosts."
        )
    drawn_hosts = []
    for name, ranks in ranks_by_host(plan.layout, hosts).items():
        domain = ""
        if domains is not None:
            domain = f"NVLink domain {domains.numbers[ranks[0]]}"
        drawn_hosts.append({"name": name, "ranks": ranks, "within": domain})
    data = {
        "title": title,
        "plan": json.loads(plan.to_json()),
        "offered": list(plan.layouts if offered is None else offered),
        "hosts": drawn_hosts,
        "job": job,
        "by": by,
    }
    style = _part("page.css")
    script = "\n".join(map(_part, SCRIPTS))
    title_in_ascii = html.escape(title).encode("ascii", "xmlcharrefreplace")
    policy = (
        f"default-src 'none'; style-src {_digest(style)}; script-src {_digest(script)}; "
        f"base-uri 'none'; form-action 'none'"
    )
    data_as_json = json.dumps(data, separators=(",", ":"))
    parts = {
        "title": title_in_ascii.decode(),
        "policy": policy,
        "style": style,
        "data": _inert(data_as_json),
        "script": script,
    }
    # One pass, so that data that looks like a slot of the template stays data.
    return re.sub(r"\{\{(\w+)\}\}", lambda slot: parts[slot[1]], _part("page.html"))


def _inert(text: str) -> str:
    """JSON that cannot end or comment out the element around it: all of these are in strings."""
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _digest(text: str) -> str:
    """A style or script as the page's policy names it: no other one runs."""
    digest = hashlib.sha256(text.encode()).digest()
    encoded = base64.b64encode(digest).decode()
    return f"'sha256-{encoded}'"


def _part(name: str) -> str:
    """A file of this package."""
    return (files("hypergrid.show") / name).read_text("utf-8")
