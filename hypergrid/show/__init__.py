"""Plans and recordings made visible. No torch.

``page.page`` is one self-contained HTML page, put together from ``page.html``, ``page.css`` and the
scripts: ``plan.js`` (arithmetic), ``elements.js`` (data, state, building blocks), ``board.js`` (the
grid), ``panel.js`` (the side panel), ``page.js`` (events). ``job`` puts a recording on it.
``picture`` draws PNG, SVG or PDF with matplotlib, ``terminal`` a table of text; both draw what
``hosts.ranks_by_host`` returns. ``diff`` compares two plans.
"""
