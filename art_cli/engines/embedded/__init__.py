"""The embedded engine: samples with torch in this process, many requests at once, on the weights the learner holds.

embedded_engine.py  EmbeddedEngine: requests in, replies out (asyncio)
engine_thread.py    runs the model in a thread, step after step
chat_prompts.py     chat requests as prompt tokens, sampled text as messages
call_syntax.py      a model family's text of tool calls
reply_text.py       the chat template, tokens as text, stop strings, text as tokens
choices.py          sampled tokens as the choices of a reply
scheduler.py        which tokens, which slots (no torch)
token_sampling.py   draws tokens
grammars.py         a reply's required format as a grammar, compiled, and the tokens that may follow
grammar_trial.py    compiles one in a process that may be ended
model_runner.py     runs the model (its layers: models/decoder/)
attention.py        keys and values of every slot, the runs in which slots attend, attention over them
"""
