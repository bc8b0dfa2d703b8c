"""A program for a Python that has llama-cpp-python: reads {"file", "lora", "prompts", "num"} and writes greedy tokens.

With "texts" it also writes their tokens. All is JSON, on standard input and output.
"""

import json
import sys

import llama_cpp

asked = json.load(sys.stdin)
model = llama_cpp.Llama(
    asked["file"], lora_path=asked.get("lora"), n_ctx=512, n_threads=1, verbose=False, type_k=0, type_v=0
)
made = []
for ids in asked["prompts"]:
    model.reset()
    tokens = model.generate(ids, temp=0.0, repeat_penalty=1.0, top_k=1)
    made.append([next(tokens) for _ in range(asked["num"])])
texts = [model.tokenize(text.encode(), add_bos=False, special=True) for text in asked.get("texts", [])]
json.dump({"tokens": made, "texts": texts}, sys.stdout)
