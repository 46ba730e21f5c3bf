"""The parts of reports: `page` makes HTML pages, `drawing` figures, `units` writes numbers."""
