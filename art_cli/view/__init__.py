"""`art view`: trajectories and runs as a local web page. Reads files; writes none but the page of --html.

sources.py       which runs and files a path names
rows.py          what the index keeps of one line
index.py         the index of a source: built in slices, and brought up to date when files grow
records.py       whole trajectories, read at the places that the index knows, and the learner's numbers of them
group_rows.py    a step's groups as rows: sorted, filtered, searched; a group's attempts as a tree of messages
segments.py      a turn as segments: context, template, messages, tool results, sampled tokens as text
page_answers.py  the answer to each URL, as plain data, with curves, evaluations and findings of a run
view_app.py      the URLs over HTTP; Guard refuses requests of other sites
page_file.py     the same answers inside one HTML file

    paths -> ViewSource -> Index -> answers -> view_app.py or page_file.py
"""
