"""The embedded engine: samples many requests together, with torch in this process, from the learner's own weights.

embedded_engine.py  EmbeddedEngine: requests in, replies out (asyncio)
engine_thread.py    runs the model in a thread, step after step
chat_prompts.py     chat requests as prompt tokens, sampled text as messages
call_syntax.py      tool calls as each model family writes them
reply_text.py       chat template, detokenization, stop strings, tokenization
choices.py          sampled tokens as reply choices
scheduler.py        picks tokens and slots for each step (no torch)
token_sampling.py   draws tokens
grammars.py         response formats as compiled grammars, and their token masks
grammar_trial.py    compiles a grammar in a killable process
model_runner.py     runs the model (layers: models/decoder/)
attention.py        keys and values in slots, and attention over them
"""
