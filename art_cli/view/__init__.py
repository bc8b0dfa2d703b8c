"""`art view`: trajectories and runs as a local web page. Reads files; writes none but the page of --html.

sources.py       which runs and files a path names
rows.py          what the index keeps of one line
index.py         the index of a source: built in slices, and brought up to date when files grow
records.py       whole trajectories, read at the places that the index knows
group_rows.py    a step's groups as rows: sorted, filtered, searched
message_tree.py  the attempts of a group laid over each other
tokens.py        the tokenizer of a run, and each token as text
segments.py      a turn as segments: context, template, messages, tool results, sampled tokens
numbers.py       curves, intervals, evaluations and findings of a run
page_answers.py  the answer to each URL, as plain data
view_app.py      the URLs over HTTP; guard.py refuses requests of other sites
page_file.py     the same answers inside one HTML file

    paths -> ViewSource -> Index -> answers -> view_app.py or page_file.py
"""
