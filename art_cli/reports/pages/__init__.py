"""Pages and pictures for people: plain data in, self-contained documents out. No network, no external scripts.

panel.py              the terminal panel of a training run
report_text.py        a run's report on a terminal, and the lines at the run's end
report_page.py        the report as a page; the frame of all pages
judge_page.py         a judge's report as a page with small SVG plots
curve.py              values by step as an SVG picture
plan_text.py          a run's plan
elsewhere_text.py     the same run on other machines
conversation_text.py  conversations as text
ci_files.py           JUnit XML and Markdown for CI
"""
