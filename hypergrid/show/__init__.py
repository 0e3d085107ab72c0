"""Pictures of a plan over its hosts. No torch.

``page.page`` is one self-contained HTML page, put together from ``page.html``, ``page.css`` and the
scripts: ``plan.js`` (arithmetic), ``elements.js`` (data, state, building blocks), ``board.js`` (the
grid), ``panel.js`` (the side panel), ``page.js`` (events). ``picture.picture`` is a PNG, SVG
or PDF for a paper, drawn by matplotlib; ``terminal.table`` lines for a terminal. All draw what
``hosts.ranks_by_host`` returns.
"""
