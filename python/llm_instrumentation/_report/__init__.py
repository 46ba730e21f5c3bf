"""What reports are made of: pages, figures, and numbers as people read them.

`page` makes one HTML file, `drawing` is how every figure looks, `units` writes numbers.
"""
