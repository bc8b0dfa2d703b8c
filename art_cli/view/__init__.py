"""`art view`: trajectories and runs as a local web page. Read-only, except for --html and labels.

paths -> ViewSource -> Index -> answers -> view_app.py or page_file.py
"""
