"""What `art` does on a GPU, in one table: `make bench-gpu`. The same rows in a small mode on any CPU.

shapes.py     the models: Qwen3 with random weights in the shapes of 0.6B and 4B, their tokenizer, two adapters
cards.py      the peak of a card by its name, or as measured
rows.py       which rows there are: what each measures, in which Python, and how long it may take
sampling.py   rows of engines: tokens per second, adapter swap, gap to the learner; sleep and wake
training.py   rows of learners: a step, its tokens per second, its share of the peak, its memory
loop.py       rows of the whole loop, `art train`
trl_loop.py   the same loop as a TRL script, vLLM colocated
task.py       what both loops play
child.py      one row in a process of its own
results.py    the rows measured so far, as JSON lines, and as the table GPU.md
"""
