"""Pages and pictures for people: plain data in, one self-contained document out. No network, no foreign scripts.

judge_page.py    what a scored file says of its judge
plots.py         small SVG plots
"""
