"""Pictures of a layout: ``terminal`` a table, ``picture`` a PNG or SVG, ``page`` an HTML page."""
