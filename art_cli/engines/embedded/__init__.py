"""The embedded engine: samples with torch in this process, many requests at once, on the weights the learner holds.

engine.py         EmbeddedEngine: requests in, replies out (asyncio)
engine_thread.py  runs the model in a thread, step after step
messages.py       chat template, tool calls, thinking        text.py       tokens as text, stop strings
scheduler.py      which tokens, which slots (no torch)       sampling.py   draws tokens
formats.py        a reply's required format as a grammar     grammars.py   compiles it, and says which tokens may follow
runner.py         runs the model (its layers: decoder/)      attention.py  attention over slots
runs.py           which slots are attended together          cache.py      keys and values of every slot
"""
