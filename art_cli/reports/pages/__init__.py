"""Pages and pictures for people: plain data in, one self-contained document out. No network, no foreign scripts.

panel.py        the lines on a terminal while a run trains
report_text.py  the report of a run, for a terminal, and the lines at the run's end
report_page.py  the same as a page, and the frame of every page
judge_page.py   the report on a judge as a page, from a scored file, with small SVG plots
curve.py        values by step as an SVG picture
"""
