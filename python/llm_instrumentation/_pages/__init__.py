"""What pages are made of: `page` makes HTML pages, `drawing` figures, `units` writes numbers."""
