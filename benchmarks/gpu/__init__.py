"""What `art` does on a GPU, in one table: `make bench-gpu`. The same rows in a small mode on any CPU.

shapes.py     the models: Qwen3 in four sizes and SmolLM2, their tokenizer, two adapters; how much work a row does
cards.py      the peak of a card by its name, or as measured
rows.py       which rows there are: what each measures, in which Python, how long it takes, and their order
sampling.py   rows of engines: tokens per second, adapter swap, sleep and wake, gap to the learner
training.py   rows of learners: a step, its tokens per second, its share of the peak, its memory
loop.py       rows of the whole loop, `art train`
art_train.py  `art train` in a process that writes down torch's memory at its end
trl_loop.py   the same loop as a TRL script, vLLM colocated
task.py       what both loops play
memory.py     memory of the card by NVML, and a large card made small
child.py      one row in a process of its own
results.py    the rows measured so far, as JSON lines, and as the tables of GPU.md
"""
