"""Pages and pictures for people: plain data in, one self-contained document out. No network, no foreign scripts.

judge_page.py   the report on a judge, from a scored file
report_text.py  what happened in a run, for a terminal
report_page.py  the same as a page
curve.py        values by step as an SVG picture
plots.py        small SVG plots of other shapes
"""
