"""The embedded engine: samples with torch in this process, many requests at once, on the weights the learner holds.

embedded_engine.py  EmbeddedEngine: requests in, replies out (asyncio)
engine_thread.py    runs the model in a thread, step after step
chat_prompts.py     chat template, tool calls, thinking
reply_text.py       tokens as text, stop strings
scheduler.py        which tokens, which slots (no torch)
token_sampling.py   draws tokens
formats.py          a reply's required format as a grammar
grammars.py         compiles it, and finds the tokens that may follow
model_runner.py     runs the model (its layers: models/decoder/)
attention.py        attention over slots
runs.py             which slots are attended together
kv_cache.py         keys and values of every slot
"""
