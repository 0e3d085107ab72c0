"""The drawing room: a plan over its hosts, for people to look at. No torch.

``page.page`` is one self-contained HTML page (``page.html``, ``page.css``; ``plan.js`` is the
arithmetic, ``page.js`` what is seen); ``picture.picture`` is a PNG or SVG for a paper, drawn by
matplotlib; ``hosts.ranks_by_host`` is what both put on the table.
"""
