"""The embedded engine: samples with torch in this process, many requests at once, on the weights the learner holds.

engine.py     EmbeddedEngine: requests in, replies out (asyncio)
messages.py   chat template, tool calls, thinking        text.py       tokens as text, stop strings
worker.py     the thread that runs the model, step after step
scheduler.py  which tokens, which slots (no torch)       sampling.py   draws tokens
formats.py    what a reply has to look like (trial.py)   grammars.py   compiles it, says which tokens may follow
runner.py     runs the model (its layers: decoder/)      attention.py  attention over slots
runs.py       which slots are attended together          cache.py      keys and values of every slot
"""
