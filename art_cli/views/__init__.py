"""Pages a person looks at: plain data in, one self-contained HTML document out. No network, no scripts from elsewhere.

judge_page.py    what a scored file says of its judge
plots.py         small SVG plots
"""
