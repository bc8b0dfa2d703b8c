"""`art view`: trajectories and runs as a local web page. Read-only, except for --html and labels.

sources.py       runs and files named by a path
rows.py          the indexed part of a line
index.py         a source's index, built in slices and updated when files grow
records.py       whole trajectories, read via the index, and the learner's numbers
group_rows.py    a step's groups as rows: sorted, filtered, searched; a group's attempts as a message tree
segments.py      a turn as segments: context, template, messages, tool results, sampled tokens
page_answers.py  the answers to all URLs as plain data, with a run's curves, evaluations and findings
view_app.py      the URLs over HTTP; PageGuard refuses requests from other sites
page_file.py     the answers inside a single HTML file
drawing.py       a recipe's drawing of a state, in a sandboxed frame
chat.py          relays conversations to an endpoint

    paths -> ViewSource -> Index -> answers -> view_app.py or page_file.py
"""
