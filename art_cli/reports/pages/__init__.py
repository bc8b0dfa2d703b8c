"""Pages and pictures for people: plain data in, one self-contained document out. No network, no foreign scripts.

panel.py        the lines on a terminal while a run trains
summary.py      the lines at its end
report_text.py  the report of a run, for a terminal
report_page.py  the same as a page, and the frame of every page
judge_page.py   the report on a judge as a page, from a scored file
curve.py        values by step as an SVG picture
plots.py        small SVG plots of other shapes
"""
